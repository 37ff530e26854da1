//! The envelope around a state machine's checkpoint: also what a Raft snapshot is.
//!
//! All numbers little endian.
//!
//! ```text
//!  0  magic "QCP1"
//!  4  crc32c of everything from byte 8
//!  8  term          u64   of the last entry covered
//! 16  index         u64   of the last entry covered, inclusive
//! 24  next_offset   u64   one past the last record covered
//! 32  broker time   u64   of the last entry covered, Unix milliseconds
//! 40  membership    u32   its length
//! 44  state         u32   its length
//! 48  membership    an encoded `internal::StoredMembership`
//!  +  state         the state machine's own bytes
//! ```

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use qute_proto::ids::Offset;
use qute_proto::internal;

use super::codec::{self, DecodeError, SnapshotMessage};
use super::types::{LogId, StoredMembership, log_id};

const MAGIC: [u8; 4] = *b"QCP1";
const HEADER_BYTES: usize = 48;

/// A state and the place in the log that it is the state of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Checkpoint {
    /// The last entry covered.
    pub last: LogId,
    /// One past the last record covered.
    pub next_offset: Offset,
    /// Broker time of the last entry covered.
    pub broker_time_ms: u64,
    /// The last membership at or before `last`.
    pub membership: StoredMembership,
    /// The state machine's bytes.
    pub state: Bytes,
}

impl Checkpoint {
    pub(super) fn encode(&self) -> Bytes {
        let membership = codec::stored_membership_to_wire(&self.membership).encode_to_vec();
        let length = |bytes: usize| u32::try_from(bytes).unwrap_or(u32::MAX);
        let size = HEADER_BYTES + membership.len() + self.state.len();
        let mut out = BytesMut::with_capacity(size);
        out.put_slice(&MAGIC);
        out.put_u32_le(0);
        out.put_u64_le(self.last.leader_id.term);
        out.put_u64_le(self.last.index);
        out.put_u64_le(self.next_offset.0);
        out.put_u64_le(self.broker_time_ms);
        out.put_u32_le(length(membership.len()));
        out.put_u32_le(length(self.state.len()));
        out.put_slice(&membership);
        out.put_slice(&self.state);
        let crc = crc32c::crc32c(out.get(8..).unwrap_or_default());
        if let Some(field) = out.get_mut(4..8) {
            field.copy_from_slice(&crc.to_le_bytes());
        }
        out.freeze()
    }

    /// Reads an envelope, whatever the bytes.
    pub(super) fn decode(mut bytes: Bytes) -> Result<Self, DecodeError> {
        if bytes.len() < HEADER_BYTES {
            return Err(DecodeError::Missing("checkpoint header"));
        }
        let crc_of_rest = crc32c::crc32c(bytes.get(8..).unwrap_or_default());
        let magic = bytes.copy_to_bytes(4);
        if magic[..] != MAGIC {
            return Err(DecodeError::OutOfRange("checkpoint magic"));
        }
        if bytes.get_u32_le() != crc_of_rest {
            return Err(DecodeError::OutOfRange("checkpoint checksum"));
        }
        let term = bytes.get_u64_le();
        let index = bytes.get_u64_le();
        let next_offset = Offset(bytes.get_u64_le());
        let broker_time_ms = bytes.get_u64_le();
        let membership_bytes = usize::try_from(bytes.get_u32_le()).unwrap_or(usize::MAX);
        let state_bytes = usize::try_from(bytes.get_u32_le()).unwrap_or(usize::MAX);
        if membership_bytes.checked_add(state_bytes) != Some(bytes.len()) {
            return Err(DecodeError::OutOfRange("checkpoint lengths"));
        }
        let membership = internal::StoredMembership::decode(bytes.split_to(membership_bytes))?;
        let membership = codec::stored_membership_from_wire(&membership)?;
        let last = log_id(term, index);
        if *membership.log_id() > Some(last) {
            return Err(DecodeError::OutOfRange("checkpoint membership"));
        }
        Ok(Self {
            last,
            next_offset,
            broker_time_ms,
            membership,
            state: bytes,
        })
    }
}

/// A snapshot that came from a peer must hold what it says it covers.
pub(super) fn check(message: &SnapshotMessage) -> Result<(), DecodeError> {
    let checkpoint = Checkpoint::decode(message.data.clone())?;
    if Some(checkpoint.last) != message.last_log_id {
        return Err(DecodeError::OutOfRange("snapshot.last_log_id"));
    }
    if checkpoint.membership != message.membership {
        return Err(DecodeError::OutOfRange("snapshot.membership"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;
    use qute_proto::ids::BrokerId;

    use super::super::types::{Membership, ReplicaNode};
    use super::*;

    fn example() -> Checkpoint {
        let nodes = BTreeMap::from([(
            7,
            ReplicaNode {
                broker: BrokerId(70),
            },
        )]);
        let membership = Membership::new(vec![BTreeSet::from([7])], nodes).unwrap();
        Checkpoint {
            last: log_id(3, 41),
            next_offset: Offset(1000),
            broker_time_ms: 1_700_000_000_000,
            membership: StoredMembership::new(Some(log_id(1, 0)), membership),
            state: Bytes::from_static(b"state"),
        }
    }

    #[test]
    fn checkpoint_that_is_encoded_keeps_its_golden_bytes() {
        let golden = [
            &b"QCP1"[..],
            &0x1cad_d29d_u32.to_le_bytes(),
            &3_u64.to_le_bytes(),
            &41_u64.to_le_bytes(),
            &1000_u64.to_le_bytes(),
            &1_700_000_000_000_u64.to_le_bytes(),
            &17_u32.to_le_bytes(),
            &5_u32.to_le_bytes(),
            &[
                0x0a, 2, 8, 1, 0x12, 11, 0x0a, 3, 0x0a, 1, 7, 0x12, 4, 8, 7, 16, 70,
            ],
            b"state",
        ]
        .concat();
        assert_eq!(example().encode(), golden);
        assert_eq!(Checkpoint::decode(golden.into()).unwrap(), example());
    }

    #[test]
    fn checkpoint_with_a_flipped_bit_is_refused() {
        let good = example().encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Checkpoint::decode(bad.into()).is_err(), "bit {bit}");
        }
    }

    proptest! {
        #[test]
        fn checkpoint_of_any_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Checkpoint::decode(bytes.into());
        }
    }
}
