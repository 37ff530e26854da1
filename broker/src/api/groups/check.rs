//! What requests may say: nothing beyond these limits reaches a coordinator.

use qute_proto::ids::{MemberId, TopicId};
use qute_proto::v1::{self, ErrorCode};

use crate::controller::placement::PARTITIONS_MAX;
use crate::controller::proposer::error;
use crate::groups::Limits;

/// The longest session timeout.
const SESSION_TIMEOUT_MAX_MS: u32 = 30 * 60 * 1000;
/// Program's own bytes beside an offset.
const METADATA_BYTES_MAX: usize = 4096;
/// Names and descriptions that members give.
const TEXT_BYTES_MAX: usize = 255;
/// Offsets, claims or partitions in one request.
const ITEMS_MAX: usize = 10_000;
/// Topics that one member reads.
const TOPICS_MAX: usize = 10_000;
/// Assignors that one member offers.
const ASSIGNORS_MAX: usize = 32;
/// Partitions in one assignment.
const ASSIGNED_MAX: usize = 200_000;

type Checked<T = ()> = Result<T, v1::Error>;

fn refuse<T>(text: impl Into<String>) -> Checked<T> {
    Err(error(ErrorCode::InvalidArgument, text))
}

fn topic(bytes: &[u8]) -> Checked<TopicId> {
    match TopicId::from_wire(bytes) {
        Some(TopicId::GROUPS | TopicId::CLUSTER) => refuse("a topic of the cluster's own"),
        Some(topic) => Ok(topic),
        None => refuse(format!("a topic id has 16 bytes, not {}", bytes.len())),
    }
}

fn partition(topic_id: &[u8], number: u32) -> Checked<TopicId> {
    if number >= PARTITIONS_MAX {
        return refuse(format!("no topic has a partition {number}"));
    }
    topic(topic_id)
}

fn member(bytes: &[u8]) -> Checked<MemberId> {
    match MemberId::from_wire(bytes) {
        Some(member) => Ok(member),
        None => refuse(format!("a member id has 16 bytes, not {}", bytes.len())),
    }
}

fn count(what: &str, count: usize, most: usize) -> Checked {
    if count <= most {
        return Ok(());
    }
    refuse(format!("{count} {what}, {most} at most in one request"))
}

fn text(what: &str, text: &str) -> Checked {
    if text.len() > TEXT_BYTES_MAX {
        return refuse(format!(
            "{what} has at most {TEXT_BYTES_MAX} bytes, this one has {}",
            text.len()
        ));
    }
    if text.chars().any(char::is_control) {
        return refuse(format!(
            "{what} has no control characters: {text:?} has one"
        ));
    }
    Ok(())
}

fn metadata(text: &str) -> Checked {
    if text.len() <= METADATA_BYTES_MAX {
        return Ok(());
    }
    refuse(format!(
        "metadata of {} bytes, {METADATA_BYTES_MAX} at most",
        text.len()
    ))
}

/// A join.
pub(super) fn join(join: &v1::Join, limits: &Limits) -> Checked {
    member(&join.member_id)?;
    text("a stable name", &join.instance)?;
    text("a rack", &join.rack)?;
    text("a client's name", &join.client)?;
    let least = u32::try_from(limits.session_timeout_min.as_millis()).unwrap_or(u32::MAX);
    if !(least..=SESSION_TIMEOUT_MAX_MS).contains(&join.session_timeout_ms) {
        return refuse(format!(
            "a session timeout of {} ms, where {least} to {SESSION_TIMEOUT_MAX_MS} are allowed",
            join.session_timeout_ms
        ));
    }
    count("assignors", join.assignors.len(), ASSIGNORS_MAX)?;
    for assignor in &join.assignors {
        text("an assignor's name", &assignor.name)?;
    }
    subscriptions(&join.topics)
}

/// What a member reads.
pub(super) fn subscriptions(topics: &[v1::TopicSubscription]) -> Checked {
    count("topics", topics.len(), TOPICS_MAX)?;
    for one in topics {
        topic(&one.topic_id)?;
        if one.partitions > PARTITIONS_MAX {
            return refuse(format!(
                "a topic has at most {PARTITIONS_MAX} partitions, not {}",
                one.partitions
            ));
        }
    }
    Ok(())
}

/// An assignment.
pub(super) fn publish(publish: &v1::Publish) -> Checked {
    let of_members = publish.assignment.iter().flat_map(|it| &it.partitions);
    let all = of_members.map(|it| it.partitions.len()).sum();
    count("partitions", all, ASSIGNED_MAX)?;
    for one in &publish.assignment {
        member(&one.member_id)?;
        for topics in &one.partitions {
            topic(&topics.topic_id)?;
        }
    }
    Ok(())
}

/// Claims given up, with their final offsets.
pub(super) fn releases(claims: &[v1::ClaimRelease]) -> Checked {
    count("claims", claims.len(), ITEMS_MAX)?;
    for claim in claims {
        partition(&claim.topic_id, claim.partition)?;
        metadata(&claim.metadata)?;
    }
    Ok(())
}

/// A commit.
pub(super) fn commit(request: &v1::CommitOffsetsRequest) -> Checked {
    if !request.member_id.is_empty() {
        member(&request.member_id)?;
    }
    count("offsets", request.offsets.len(), ITEMS_MAX)?;
    for one in &request.offsets {
        partition(&one.topic_id, one.partition)?;
        metadata(&one.metadata)?;
    }
    Ok(())
}

/// A reset.
pub(super) fn reset(request: &v1::ResetOffsetsRequest) -> Checked {
    count("offsets", request.offsets.len(), ITEMS_MAX)?;
    for one in &request.offsets {
        partition(&one.topic_id, one.partition)?;
    }
    Ok(())
}

/// The partitions that a request names.
pub(super) fn partitions(named: &[v1::TopicPartitions]) -> Checked<Vec<(TopicId, u32)>> {
    let all = named.iter().map(|it| it.partitions.len()).sum();
    count("partitions", all, ITEMS_MAX)?;
    count("topics", named.len(), ITEMS_MAX)?;
    let mut read = Vec::with_capacity(all);
    for one in named {
        let topic = topic(&one.topic_id)?;
        read.extend(one.partitions.iter().map(|number| (topic, *number)));
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;

    use super::*;

    fn limits() -> Limits {
        Limits {
            groups_max: 1,
            members_max: 1,
            offsets_max: 1,
            offsets_retention: Duration::from_secs(1),
            session_timeout_min: Duration::from_secs(1),
        }
    }

    fn good() -> v1::Join {
        v1::Join {
            group: "g".into(),
            member_id: MemberId::random().to_wire(),
            session_timeout_ms: 10_000,
            topics: vec![v1::TopicSubscription {
                topic_id: TopicId::random().to_wire(),
                partitions: 64,
            }],
            ..v1::Join::default()
        }
    }

    #[test]
    fn join_out_of_range_is_refused_with_what_is_allowed() {
        assert_eq!(join(&good(), &limits()), Ok(()));
        type Case = (fn(&mut v1::Join), &'static str);
        let cases: [Case; 8] = [
            (|it| it.member_id = Bytes::from_static(b"short"), "16 bytes"),
            (|it| it.session_timeout_ms = 999, "1000 to 1800000"),
            (|it| it.session_timeout_ms = 1_800_001, "1000 to 1800000"),
            (|it| it.instance = "x".repeat(256), "at most 255"),
            (|it| it.client = "a\nb".into(), "control"),
            (|it| it.topics[0].topic_id = Bytes::new(), "16 bytes"),
            (|it| it.topics[0].partitions = u32::MAX, "partitions"),
            (
                |it| it.topics[0].topic_id = TopicId::GROUPS.to_wire(),
                "cluster's own",
            ),
        ];
        for (spoil, said) in cases {
            let mut bad = good();
            spoil(&mut bad);
            let refused = join(&bad, &limits()).unwrap_err();
            assert_eq!(refused.code(), ErrorCode::InvalidArgument);
            assert!(refused.message.contains(said), "{}", refused.message);
        }
    }

    #[test]
    fn commit_out_of_range_is_refused() {
        let one = v1::OffsetCommit {
            topic_id: TopicId::random().to_wire(),
            metadata: "x".repeat(METADATA_BYTES_MAX),
            ..v1::OffsetCommit::default()
        };
        let request = |offsets| v1::CommitOffsetsRequest {
            offsets,
            ..v1::CommitOffsetsRequest::default()
        };
        assert_eq!(commit(&request(vec![one.clone()])), Ok(()));
        let long = v1::OffsetCommit {
            metadata: "x".repeat(METADATA_BYTES_MAX + 1),
            ..one.clone()
        };
        let beyond = v1::OffsetCommit {
            partition: PARTITIONS_MAX,
            ..one.clone()
        };
        for offsets in [vec![long], vec![beyond], vec![one; ITEMS_MAX + 1]] {
            let refused = commit(&request(offsets)).unwrap_err();
            assert_eq!(refused.code(), ErrorCode::InvalidArgument);
        }
    }
}
