//! A partition's refusals as `qute.v1` errors.

use qute_proto::ids::{Offset, PartitionId, TopicId};
use qute_proto::v1;

pub(super) use crate::controller::proposer::error as plain;
use crate::partition::directory::{LeaderDirectory, Presence};
use crate::partition::error::Error;
use crate::partition::replica::Bounds;

/// The partition that a request names.
pub(super) fn partition_id(topic_id: &[u8], partition: u32) -> Result<PartitionId, v1::Error> {
    let topic = TopicId::from_wire(topic_id).ok_or_else(|| {
        plain(
            v1::ErrorCode::InvalidArgument,
            format!("a topic id has 16 bytes, not {}", topic_id.len()),
        )
    })?;
    if matches!(topic, TopicId::GROUPS | TopicId::CLUSTER) {
        return Err(plain(
            v1::ErrorCode::InvalidArgument,
            "this topic belongs to the cluster itself: programs don't write or read it",
        ));
    }
    Ok(PartitionId { topic, partition })
}

/// The bounds as they travel.
pub(super) fn bounds(bounds: Bounds) -> v1::OffsetBounds {
    v1::OffsetBounds {
        log_start_offset: bounds.log_start.0,
        high_watermark: bounds.high_watermark.0,
    }
}

/// What a client is told about a refusal by `partition`.
pub(super) fn refusal(
    error: &Error,
    partition: PartitionId,
    directory: &dyn LeaderDirectory,
) -> v1::Error {
    let code = match error {
        Error::NotHere(_) => return absent(error, partition, directory),
        Error::NotLeader => v1::ErrorCode::NotLeader,
        // A failed replica loses its leadership: the client finds the next leader.
        Error::NotReady | Error::LeaderLost | Error::Failed(_) => v1::ErrorCode::NotReady,
        Error::Corrupt(_) => v1::ErrorCode::CorruptBatch,
        Error::RecordTooLarge { .. } => v1::ErrorCode::RecordTooLarge,
        Error::BatchTooLarge { .. } => v1::ErrorCode::BatchTooLarge,
        Error::StorageFull => v1::ErrorCode::StorageFull,
        Error::UnknownProducer => v1::ErrorCode::UnknownProducer,
        Error::OutOfOrder { .. } => v1::ErrorCode::OutOfOrderSequence,
        Error::Fenced { .. } => v1::ErrorCode::ProducerFenced,
        Error::DuplicateUnknownOffset => v1::ErrorCode::DuplicateSequence,
        Error::Overlapping => v1::ErrorCode::InvalidArgument,
        Error::Overloaded => v1::ErrorCode::Overloaded,
        Error::OutcomeUnknown => v1::ErrorCode::OutcomeUnknown,
        Error::OutOfRange { .. } => v1::ErrorCode::OffsetOutOfRange,
        Error::Quarantined(_) => v1::ErrorCode::ReplicaQuarantined,
    };
    let mut wire = plain(code, format!("partition {partition}: {error}"));
    match error {
        Error::NotLeader
        | Error::LeaderLost
        | Error::Quarantined(_)
        | Error::Failed(_)
        | Error::OutcomeUnknown => {
            wire.leader_hint = hint(partition, directory);
        }
        Error::OutOfRange {
            log_start,
            high_watermark,
            ..
        } => wire.bounds = Some(bounds(Bounds::new(*log_start, *high_watermark))),
        _ => {}
    }
    wire
}

/// The partition is not open here: it is elsewhere, or nowhere.
fn absent(error: &Error, partition: PartitionId, directory: &dyn LeaderDirectory) -> v1::Error {
    match directory.presence(partition) {
        Presence::Exists => v1::Error {
            leader_hint: hint(partition, directory),
            ..plain(v1::ErrorCode::NotLeader, error.to_string())
        },
        Presence::UnknownPartition => plain(
            v1::ErrorCode::UnknownPartition,
            format!("the topic has no partition {}", partition.partition),
        ),
        Presence::Deleted { name, made_again } => v1::Error {
            authoritative: true,
            ..plain(
                v1::ErrorCode::UnknownTopic,
                deleted(partition, name.as_deref(), made_again),
            )
        },
        Presence::UnknownTopic { authoritative } => v1::Error {
            authoritative,
            ..plain(
                v1::ErrorCode::UnknownTopic,
                format!("there is no topic with id {}", partition.topic),
            )
        },
    }
}

fn deleted(partition: PartitionId, name: Option<&str>, made_again: bool) -> String {
    let id = partition.topic;
    match name {
        Some(name) if made_again => format!(
            "topic `{name}` with id {id} was deleted; another topic of that name has been made since"
        ),
        Some(name) => format!("topic `{name}` with id {id} was deleted"),
        None => format!("the topic with id {id} was deleted"),
    }
}

fn hint(partition: PartitionId, directory: &dyn LeaderDirectory) -> Option<v1::LeaderHint> {
    directory.leader(partition).map(|leader| v1::LeaderHint {
        broker_id: leader.broker.0,
        leader_epoch: leader.leader_epoch,
        address: leader.address,
    })
}

/// An offset error with the bounds it was judged by.
pub(super) fn out_of_range(offset: Offset, bounds: Bounds) -> Error {
    Error::OutOfRange {
        offset,
        log_start: bounds.log_start,
        high_watermark: bounds.high_watermark,
    }
}
