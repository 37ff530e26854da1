//! Datagrams: who a member is, and the envelope around foca's packets.
//!
//! ```text
//!  0        4               20        24
//!  | magic  | cluster id    | crc32c  | foca packet (postcard) ...
//! ```
//!
//! A datagram of another cluster, of another version, cut short, flipped or simply noise is
//! dropped before foca sees it. Reading never panics and never allocates.

use std::net::SocketAddr;

use qute_proto::ids::{BrokerId, ClusterId};
use serde::{Deserialize, Serialize};

/// "Qute gossip, format 1".
const MAGIC: [u8; 4] = *b"QGo1";
const HEADER_BYTES: usize = 24;

/// Largest foca packet: with the envelope it fits one Ethernet frame.
pub const PACKET_BYTES_MAX: usize = 1280;

/// Largest datagram that can be one of ours.
pub const DATAGRAM_BYTES_MAX: usize = HEADER_BYTES + PACKET_BYTES_MAX;

/// A member as foca knows it: one life of a broker at one address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    broker: u64,
    /// Start counter of the broker: a restart supersedes whatever was said of the life before.
    boot: u64,
    /// Rises when the cluster has wrongly given this life up.
    bump: u32,
    address: SocketAddr,
}

impl Identity {
    /// A life of a broker.
    #[must_use]
    pub fn new(broker: BrokerId, boot: u64, address: SocketAddr) -> Self {
        Self {
            broker: broker.0,
            boot,
            bump: 0,
            address,
        }
    }

    /// Which broker.
    #[must_use]
    pub fn broker(&self) -> BrokerId {
        BrokerId(self.broker)
    }

    /// Its start counter.
    #[must_use]
    pub fn boot(&self) -> u64 {
        self.boot
    }

    /// Where it receives gossip.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl foca::Identity for Identity {
    type Addr = u64;

    fn renew(&self) -> Option<Self> {
        Some(Self {
            bump: self.bump.checked_add(1)?,
            ..self.clone()
        })
    }

    fn addr(&self) -> u64 {
        self.broker
    }

    fn win_addr_conflict(&self, adversary: &Self) -> bool {
        (self.boot, self.bump) > (adversary.boot, adversary.bump)
    }
}

/// Puts a foca packet into its envelope.
#[must_use]
pub fn seal(cluster: ClusterId, packet: &[u8]) -> Vec<u8> {
    let mut datagram = Vec::with_capacity(HEADER_BYTES + packet.len());
    datagram.extend_from_slice(&MAGIC);
    datagram.extend_from_slice(cluster.0.as_bytes());
    datagram.extend_from_slice(&checksum(cluster, packet).to_le_bytes());
    datagram.extend_from_slice(packet);
    datagram
}

/// Takes a foca packet out of its envelope; `None` for what is not for this cluster.
#[must_use]
pub fn open(cluster: ClusterId, datagram: &[u8]) -> Option<&[u8]> {
    let (magic, rest) = datagram.split_first_chunk::<4>()?;
    let (id, rest) = rest.split_first_chunk::<16>()?;
    let (crc, packet) = rest.split_first_chunk::<4>()?;
    let ours = *magic == MAGIC
        && id == cluster.0.as_bytes()
        && packet.len() <= PACKET_BYTES_MAX
        && u32::from_le_bytes(*crc) == checksum(cluster, packet);
    ours.then_some(packet)
}

fn checksum(cluster: ClusterId, packet: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(cluster.0.as_bytes()), packet)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cluster(n: u128) -> ClusterId {
        ClusterId(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn sealed_packet_opens_in_its_cluster_only() {
        let datagram = seal(cluster(1), b"packet");
        assert_eq!(open(cluster(1), &datagram), Some(&b"packet"[..]));
        assert_eq!(open(cluster(2), &datagram), None);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let datagram = seal(cluster(1), b"packet");
        for bit in 0..datagram.len() * 8 {
            let mut flipped = datagram.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(open(cluster(1), &flipped), None, "bit {bit}");
        }
        for length in 0..datagram.len() {
            assert_eq!(
                open(cluster(1), &datagram[..length]),
                None,
                "length {length}"
            );
        }
    }

    #[test]
    fn restart_and_renewal_win_over_the_life_before() {
        use foca::Identity as _;
        let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
        let old = Identity::new(BrokerId(1), 1, address);
        let renewed = old.renew().unwrap();
        let restarted = Identity::new(BrokerId(1), 2, address);
        assert!(renewed.win_addr_conflict(&old) && !old.win_addr_conflict(&renewed));
        assert!(restarted.win_addr_conflict(&renewed));
        assert_eq!(old.addr(), restarted.addr());
    }

    proptest! {
        #[test]
        fn noise_is_dropped(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(open(cluster(1), &noise), None);
        }

        /// Even noise in a valid envelope only makes foca complain.
        #[test]
        fn noise_in_a_valid_envelope_never_panics(
            noise in proptest::collection::vec(any::<u8>(), 0..PACKET_BYTES_MAX),
        ) {
            let address: SocketAddr = "127.0.0.1:1".parse().unwrap();
            let mut foca = foca::Foca::new(
                Identity::new(BrokerId(1), 1, address),
                super::super::settings(),
                rand::make_rng::<rand::rngs::StdRng>(),
                foca::PostcardCodec,
            );
            let mut runtime = foca::AccumulatingRuntime::new();
            let datagram = seal(cluster(1), &noise);
            let packet = open(cluster(1), &datagram).unwrap();
            let _ = foca.handle_data(packet, &mut runtime);
        }
    }
}
