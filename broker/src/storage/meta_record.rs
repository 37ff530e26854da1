//! Records of the meta log and what they add up to.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use qute_proto::ids::{PartitionId, ReplicaId, TopicId};

use super::codec::{Put, Reader};
use super::types::{Position, ReplicaKey, VoteRecord};

/// Frames at and above `from_index` written in rounds up to `round` are void (S3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TruncationMark {
    pub from_index: u64,
    pub round: u64,
}

/// A snapshot install that has begun: until it is done, the log may end below its checkpoint (S1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ResetMark {
    pub position: Position,
    pub base_offset: u64,
    /// Broker time of the entry there (S19: what follows is not earlier).
    pub time_ms: u64,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum MetaRecord {
    ReplicaAdded(ReplicaKey),
    /// The id is spent: it never comes back (S9).
    ReplicaRemoved(ReplicaKey),
    Vote(ReplicaKey, VoteRecord),
    Purged(ReplicaKey, Position),
    Committed(ReplicaKey, Position),
    Truncated(ReplicaKey, TruncationMark),
    /// Marks of earlier rounds are no longer needed: no such frame is in the active segment.
    RoundFloor(ReplicaKey, u64),
    ResetBegun(ReplicaKey, ResetMark),
    /// The install is complete: the log begins after its position.
    ResetDone(ReplicaKey),
    /// The install never happened.
    ResetAbandoned(ReplicaKey),
    Blob(String, Bytes),
}

/// What the meta log knows of one replica.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct ReplicaMeta {
    pub vote: Option<VoteRecord>,
    pub purged: Option<Position>,
    pub committed: Option<Position>,
    pub marks: Vec<TruncationMark>,
    pub reset: Option<ResetMark>,
}

impl ReplicaMeta {
    /// Whether a truncation cut this frame off (S3).
    pub(super) fn is_void(&self, index: u64, round: u64) -> bool {
        self.marks
            .iter()
            .any(|mark| index >= mark.from_index && round <= mark.round)
    }
}

/// The sum of all records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct MetaState {
    pub replicas: BTreeMap<ReplicaKey, ReplicaMeta>,
    pub removed: BTreeSet<ReplicaKey>,
    pub blobs: BTreeMap<String, Bytes>,
}

impl MetaState {
    pub(super) fn apply(&mut self, record: &MetaRecord) {
        match record {
            MetaRecord::ReplicaAdded(key) => {
                self.replicas.entry(*key).or_default();
            }
            MetaRecord::ReplicaRemoved(key) => {
                self.replicas.remove(key);
                self.removed.insert(*key);
            }
            MetaRecord::Blob(name, bytes) => {
                self.blobs.insert(name.clone(), bytes.clone());
            }
            MetaRecord::Vote(key, vote) => self.with(key, |meta| meta.vote = Some(*vote)),
            MetaRecord::Purged(key, position) => {
                self.with(key, |meta| meta.purged = Some(*position));
            }
            MetaRecord::Committed(key, position) => self.with(key, |meta| {
                // One that waited while a snapshot was installed is too old.
                if meta
                    .purged
                    .is_none_or(|purged| purged.index < position.index)
                {
                    meta.committed = Some(*position);
                }
            }),
            MetaRecord::Truncated(key, mark) => self.with(key, |meta| {
                // A mark that voids less, of earlier rounds, says nothing more.
                meta.marks
                    .retain(|old| old.from_index < mark.from_index || old.round > mark.round);
                meta.marks.push(*mark);
                // S1: a commit mark never stands beyond the end.
                meta.committed = meta
                    .committed
                    .filter(|committed| committed.index < mark.from_index);
            }),
            MetaRecord::RoundFloor(key, round) => {
                self.with(key, |meta| meta.marks.retain(|mark| mark.round >= *round));
            }
            MetaRecord::ResetBegun(key, reset) => self.with(key, |meta| meta.reset = Some(*reset)),
            MetaRecord::ResetDone(key) => self.with(key, |meta| {
                if let Some(reset) = meta.reset.take() {
                    meta.purged = Some(reset.position);
                    meta.committed = Some(reset.position);
                }
            }),
            MetaRecord::ResetAbandoned(key) => self.with(key, |meta| meta.reset = None),
        }
    }

    fn with(&mut self, key: &ReplicaKey, change: impl FnOnce(&mut ReplicaMeta)) {
        // Records of a replica that is not listed (removed since) mean nothing.
        if let Some(meta) = self.replicas.get_mut(key) {
            change(meta);
        }
    }

    /// The records that add up to this state.
    pub(super) fn records(&self) -> Vec<MetaRecord> {
        let mut out = Vec::new();
        for (name, bytes) in &self.blobs {
            out.push(MetaRecord::Blob(name.clone(), bytes.clone()));
        }
        for key in &self.removed {
            out.push(MetaRecord::ReplicaRemoved(*key));
        }
        for (key, meta) in &self.replicas {
            out.push(MetaRecord::ReplicaAdded(*key));
            out.extend(meta.vote.map(|vote| MetaRecord::Vote(*key, vote)));
            out.extend(meta.purged.map(|at| MetaRecord::Purged(*key, at)));
            out.extend(meta.committed.map(|at| MetaRecord::Committed(*key, at)));
            for mark in &meta.marks {
                out.push(MetaRecord::Truncated(*key, *mark));
            }
            out.extend(meta.reset.map(|mark| MetaRecord::ResetBegun(*key, mark)));
        }
        out
    }
}

fn put_key(out: &mut Vec<u8>, key: &ReplicaKey) {
    out.extend_from_slice(key.partition.topic.0.as_bytes());
    out.put_u32_le(key.partition.partition);
    out.put_u64_le(key.replica.0);
}

fn key(from: &mut Reader<'_>) -> Option<ReplicaKey> {
    let topic = TopicId::from_wire(from.bytes(16)?)?;
    let partition = from.u32()?;
    Some(ReplicaKey {
        partition: PartitionId { topic, partition },
        replica: ReplicaId(from.u64()?),
    })
}

fn put_position(out: &mut Vec<u8>, position: Position) {
    out.put_u64_le(position.term);
    out.put_u64_le(position.index);
}

fn position(from: &mut Reader<'_>) -> Option<Position> {
    Some(Position {
        term: from.u64()?,
        index: from.u64()?,
    })
}

impl MetaRecord {
    pub(super) fn encode_into(&self, out: &mut Vec<u8>) {
        match self {
            Self::ReplicaAdded(key) => {
                out.put_u8_le(1);
                put_key(out, key);
            }
            Self::ReplicaRemoved(key) => {
                out.put_u8_le(2);
                put_key(out, key);
            }
            Self::Vote(key, vote) => {
                out.put_u8_le(3);
                put_key(out, key);
                out.put_u64_le(vote.term);
                out.put_u64_le(vote.voted_for.unwrap_or(0));
                out.put_u8_le(u8::from(vote.voted_for.is_some()) | (u8::from(vote.committed) << 1));
            }
            Self::Purged(key, at) => {
                out.put_u8_le(4);
                put_key(out, key);
                put_position(out, *at);
            }
            Self::Committed(key, at) => {
                out.put_u8_le(5);
                put_key(out, key);
                put_position(out, *at);
            }
            Self::Truncated(key, mark) => {
                out.put_u8_le(6);
                put_key(out, key);
                out.put_u64_le(mark.from_index);
                out.put_u64_le(mark.round);
            }
            Self::Blob(name, bytes) => {
                out.put_u8_le(7);
                out.put_sized(name.as_bytes());
                out.put_sized(bytes);
            }
            Self::RoundFloor(key, round) => {
                out.put_u8_le(8);
                put_key(out, key);
                out.put_u64_le(*round);
            }
            Self::ResetBegun(key, reset) => {
                out.put_u8_le(9);
                put_key(out, key);
                put_position(out, reset.position);
                out.put_u64_le(reset.base_offset);
                out.put_u64_le(reset.time_ms);
            }
            Self::ResetDone(key) => {
                out.put_u8_le(10);
                put_key(out, key);
            }
            Self::ResetAbandoned(key) => {
                out.put_u8_le(11);
                put_key(out, key);
            }
        }
    }

    /// `None` for a kind that this release does not know, and for cut fields.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader::new(bytes);
        let record = match from.u8()? {
            1 => Self::ReplicaAdded(key(&mut from)?),
            2 => Self::ReplicaRemoved(key(&mut from)?),
            3 => {
                let key = key(&mut from)?;
                let (term, voted_for, flags) = (from.u64()?, from.u64()?, from.u8()?);
                Self::Vote(
                    key,
                    VoteRecord {
                        term,
                        voted_for: (flags & 1 != 0).then_some(voted_for),
                        committed: flags & 2 != 0,
                    },
                )
            }
            4 => Self::Purged(key(&mut from)?, position(&mut from)?),
            5 => Self::Committed(key(&mut from)?, position(&mut from)?),
            6 => Self::Truncated(
                key(&mut from)?,
                TruncationMark {
                    from_index: from.u64()?,
                    round: from.u64()?,
                },
            ),
            7 => Self::Blob(
                String::from_utf8(from.sized()?.to_vec()).ok()?,
                Bytes::copy_from_slice(from.sized()?),
            ),
            8 => Self::RoundFloor(key(&mut from)?, from.u64()?),
            9 => Self::ResetBegun(
                key(&mut from)?,
                ResetMark {
                    position: position(&mut from)?,
                    base_offset: from.u64()?,
                    time_ms: from.u64()?,
                },
            ),
            10 => Self::ResetDone(key(&mut from)?),
            11 => Self::ResetAbandoned(key(&mut from)?),
            _ => return None,
        };
        from.is_empty().then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meta_record_every_kind_survives_encoding() {
        let key = ReplicaKey {
            partition: PartitionId {
                topic: TopicId::random(),
                partition: 3,
            },
            replica: ReplicaId(9),
        };
        let at = Position { term: 2, index: 5 };
        let vote = VoteRecord {
            term: 4,
            voted_for: Some(0),
            committed: true,
        };
        let records = [
            MetaRecord::ReplicaAdded(key),
            MetaRecord::ReplicaRemoved(key),
            MetaRecord::Vote(key, vote),
            MetaRecord::Vote(
                key,
                VoteRecord {
                    voted_for: None,
                    committed: false,
                    ..vote
                },
            ),
            MetaRecord::Purged(key, at),
            MetaRecord::Committed(key, at),
            MetaRecord::Truncated(
                key,
                TruncationMark {
                    from_index: 6,
                    round: 8,
                },
            ),
            MetaRecord::RoundFloor(key, 11),
            MetaRecord::ResetBegun(
                key,
                ResetMark {
                    position: at,
                    base_offset: 77,
                    time_ms: 88,
                },
            ),
            MetaRecord::ResetDone(key),
            MetaRecord::ResetAbandoned(key),
            MetaRecord::Blob("cluster".into(), Bytes::from_static(b"x")),
        ];
        for record in records {
            let mut bytes = Vec::new();
            record.encode_into(&mut bytes);
            assert_eq!(MetaRecord::decode(&bytes), Some(record.clone()));
            assert_eq!(
                MetaRecord::decode(&bytes[..bytes.len() - 1]),
                None,
                "{record:?}"
            );
        }
        assert_eq!(MetaRecord::decode(&[200]), None);
    }

    #[test]
    fn meta_state_rebuilt_from_its_own_records_is_the_same() {
        let key = ReplicaKey {
            partition: PartitionId {
                topic: TopicId::random(),
                partition: 0,
            },
            replica: ReplicaId(1),
        };
        let gone = ReplicaKey {
            replica: ReplicaId(2),
            ..key
        };
        let mut state = MetaState::default();
        for record in [
            MetaRecord::ReplicaAdded(key),
            MetaRecord::ReplicaAdded(gone),
            MetaRecord::ReplicaRemoved(gone),
            MetaRecord::Truncated(
                key,
                TruncationMark {
                    from_index: 9,
                    round: 3,
                },
            ),
            MetaRecord::Truncated(
                key,
                TruncationMark {
                    from_index: 12,
                    round: 5,
                },
            ),
            MetaRecord::Blob("a".into(), Bytes::from_static(b"b")),
        ] {
            state.apply(&record);
        }
        let mut again = MetaState::default();
        for record in state.records() {
            again.apply(&record);
        }
        assert_eq!(again, state);
        let meta = &state.replicas[&key];
        assert!(meta.is_void(9, 3) && !meta.is_void(9, 4) && meta.is_void(12, 5));
    }
}
