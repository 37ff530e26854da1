//! Every Raft message there and back, golden bytes, and bytes that make no sense.

use proptest::prelude::*;

use super::*;

fn voters(ids: &[u64]) -> BTreeSet<u64> {
    ids.iter().copied().collect()
}

fn membership(configs: &[&[u64]], learners: &[u64]) -> Membership {
    let nodes: BTreeMap<u64, ReplicaNode> = configs
        .iter()
        .flat_map(|config| config.iter())
        .chain(learners)
        .map(|id| {
            let broker = BrokerId(id * 10);
            (*id, ReplicaNode { broker })
        })
        .collect();
    let configs = configs.iter().map(|config| voters(config)).collect();
    Membership::new(configs, nodes).unwrap()
}

fn batch(term: u64, index: u64, bytes: Bytes) -> Entry {
    Entry {
        log_id: log_id(term, index),
        payload: EntryPayload::Normal(Payload::batch(bytes, 3, 1_700_000_000_000)),
    }
}

fn append() -> AppendEntriesRequest<TypeConfig> {
    AppendEntriesRequest {
        vote: vote(5, 2, true),
        prev_log_id: Some(log_id(4, 9)),
        entries: vec![
            Entry {
                log_id: log_id(5, 10),
                payload: EntryPayload::Blank,
            },
            batch(5, 11, Bytes::from_static(b"records")),
            Entry {
                log_id: log_id(5, 12),
                payload: EntryPayload::Membership(membership(&[&[1, 2], &[2, 3]], &[4])),
            },
            Entry {
                log_id: log_id(5, 13),
                payload: EntryPayload::Normal(Payload::command(Bytes::from_static(b"do"), 7)),
            },
        ],
        leader_commit: Some(log_id(4, 9)),
    }
}

fn assert_same(left: &AppendEntriesRequest<TypeConfig>, right: &AppendEntriesRequest<TypeConfig>) {
    assert_eq!(left.vote, right.vote);
    assert_eq!(left.prev_log_id, right.prev_log_id);
    assert_eq!(left.entries, right.entries);
    assert_eq!(left.leader_commit, right.leader_commit);
}

#[test]
fn append_request_that_travels_arrives_unchanged() {
    let sent = append_request_to_wire(&append()).encode_to_vec();
    let wire = internal::AppendRequest::decode(Bytes::from(sent)).unwrap();
    assert_same(&append_request_from_wire(wire).unwrap(), &append());
}

#[test]
fn append_request_keeps_its_golden_bytes() {
    let request = AppendEntriesRequest {
        vote: vote(5, 2, true),
        prev_log_id: Some(log_id(4, 9)),
        entries: vec![batch(5, 10, Bytes::from_static(b"xyz"))],
        leader_commit: None,
    };
    let golden: &[u8] = &[
        0x0a, 8, 8, 5, 16, 2, 24, 1, 32, 1, // vote
        0x12, 4, 8, 4, 16, 9, // prev_log_id
        0x1a, 20, 8, 5, 16, 10, 24, 1, // entry: term, index, kind
        32, 0x80, 0xd0, 0x95, 0xff, 0xbc, 0x31, // broker time
        0x2a, 3, b'x', b'y', b'z', 48, 3, // payload, records
    ];
    assert_eq!(append_request_to_wire(&request).encode_to_vec(), golden);
}

#[test]
fn append_request_with_a_large_batch_shares_its_bytes_and_copies_small_ones() {
    let large = Bytes::from(vec![7_u8; 64 << 10]);
    let mut request = append();
    request.entries = vec![
        batch(5, 10, large),
        batch(5, 11, Bytes::from_static(b"small")),
    ];
    let message = Bytes::from(append_request_to_wire(&request).encode_to_vec());
    let inside = |bytes: &Bytes| {
        let range = message.as_ptr_range();
        range.contains(&bytes.as_ptr())
    };
    let wire = internal::AppendRequest::decode(message.clone()).unwrap();
    let read = append_request_from_wire(wire).unwrap();
    let payload = |at: usize| match &read.entries[at].payload {
        EntryPayload::Normal(payload) => payload.bytes.clone(),
        other => panic!("{other}"),
    };
    assert!(inside(&payload(0)), "large: zero-copy");
    assert!(
        !inside(&payload(1)),
        "small: does not keep the message alive"
    );
}

#[test]
fn append_request_that_openraft_could_not_bear_is_refused() {
    type Spoil = fn(&mut internal::AppendRequest);
    let cases: [(&str, Spoil); 11] = [
        ("no vote", |wire| wire.vote = None),
        ("a candidate's vote", |wire| {
            wire.vote.as_mut().unwrap().committed = false;
        }),
        ("nobody's vote", |wire| {
            wire.vote.as_mut().unwrap().has_voted_for = false;
        }),
        ("a hole behind prev", |wire| {
            wire.prev_log_id.as_mut().unwrap().index = 8;
        }),
        ("a hole", |wire| wire.entries[2].index += 1),
        ("a falling term", |wire| wire.entries[1].term = 3),
        ("a term beyond the leader's", |wire| {
            wire.entries[3].term = 6
        }),
        ("an unknown kind", |wire| wire.entries[0].kind = 9),
        ("a batch of no records", |wire| wire.entries[1].records = 0),
        ("a command of records", |wire| wire.entries[3].records = 1),
        ("a membership that is none", |wire| {
            wire.entries[2].payload = Bytes::from_static(b"\x0a\x00");
        }),
    ];
    for (what, spoil) in cases {
        let mut wire = append_request_to_wire(&append());
        spoil(&mut wire);
        assert!(append_request_from_wire(wire).is_err(), "{what}");
    }
}

#[test]
fn append_request_with_too_many_entries_is_refused() {
    let mut wire = append_request_to_wire(&append());
    let blank = wire.entries[0].clone();
    wire.entries = (0..=ENTRIES_MAX as u64)
        .map(|at| internal::LogEntry {
            index: 10 + at,
            ..blank.clone()
        })
        .collect();
    assert!(append_request_from_wire(wire).is_err());
}

#[test]
fn append_answers_that_travel_arrive_unchanged() {
    let answers = [
        AppendAnswer::Handled(AppendEntriesResponse::Success),
        AppendAnswer::Handled(AppendEntriesResponse::PartialSuccess(None)),
        AppendAnswer::Handled(AppendEntriesResponse::PartialSuccess(Some(log_id(3, 4)))),
        AppendAnswer::Handled(AppendEntriesResponse::Conflict),
        AppendAnswer::Handled(AppendEntriesResponse::HigherVote(vote(9, 1, false))),
        AppendAnswer::Refused("full".to_owned()),
    ];
    for answer in answers {
        let wire = append_answer_to_wire(&answer).encode_to_vec();
        assert_eq!(append_answer_from_wire(wire.into()).unwrap(), answer);
    }
    assert!(append_answer_from_wire(Bytes::new()).is_err());
}

#[test]
fn votes_that_travel_arrive_unchanged() {
    let mut request = VoteRequest::new(vote(8, 3, false), Some(log_id(7, 20)));
    request.leadership_transfer = true;
    let read = decode_vote_request(encode_vote_request(&request)).unwrap();
    assert_eq!(read, request);
    let response = VoteResponse::new(vote(8, 3, false), Some(log_id(7, 21)), true);
    let read = decode_vote_response(encode_vote_response(&response)).unwrap();
    assert_eq!(read, response);
    let leader = VoteRequest::new(vote(8, 3, true), None);
    assert!(decode_vote_request(encode_vote_request(&leader)).is_err());
}

#[test]
fn snapshots_that_travel_arrive_unchanged() {
    let message = SnapshotMessage {
        vote: vote(8, 3, true),
        last_log_id: Some(log_id(7, 20)),
        membership: StoredMembership::new(Some(log_id(1, 0)), membership(&[&[1, 2, 3]], &[])),
        data: Bytes::from_static(b"state"),
    };
    let read = decode_snapshot_request(encode_snapshot_request(message.clone())).unwrap();
    assert_eq!(read, message);
    let beyond = SnapshotMessage {
        membership: StoredMembership::new(Some(log_id(7, 21)), membership(&[&[1]], &[])),
        ..message.clone()
    };
    assert!(decode_snapshot_request(encode_snapshot_request(beyond)).is_err());
    let later = SnapshotMessage {
        last_log_id: Some(log_id(9, 20)),
        ..message
    };
    assert!(decode_snapshot_request(encode_snapshot_request(later)).is_err());
    let response = SnapshotResponse::new(vote(8, 3, true));
    let read = decode_snapshot_response(encode_snapshot_response(&response)).unwrap();
    assert_eq!(read, response);
}

#[test]
fn transfers_that_travel_arrive_unchanged() {
    for last in [None, Some(log_id(4, 4))] {
        let request = TransferLeaderRequest::new(vote(4, 1, true), 2, last);
        let read = decode_transfer_request(encode_transfer_request(&request)).unwrap();
        assert_eq!(read, request);
    }
    let responses: [TransferLeaderResponse<TypeConfig>; 3] = [
        Ok(()),
        Err(TransferLeaderError::VoteChanged {
            expected: vote(1, 1, true),
            actual: vote(2, 2, false),
        }),
        Err(TransferLeaderError::LogNotFlushed {
            expected: Some(log_id(1, 2)),
            actual: None,
        }),
    ];
    for response in responses {
        let read = decode_transfer_response(encode_transfer_response(&response)).unwrap();
        assert_eq!(read, response);
    }
}

proptest! {
    #[test]
    fn decoders_of_any_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let bytes = Bytes::from(bytes);
        if let Ok(wire) = internal::AppendRequest::decode(bytes.clone()) {
            let _ = append_request_from_wire(wire);
        }
        let _ = append_answer_from_wire(bytes.clone());
        let _ = decode_vote_request(bytes.clone());
        let _ = decode_vote_response(bytes.clone());
        let _ = decode_snapshot_request(bytes.clone());
        let _ = decode_snapshot_response(bytes.clone());
        let _ = decode_transfer_request(bytes.clone());
        let _ = decode_transfer_response(bytes.clone());
        let _ = decode_membership(&bytes);
    }

    #[test]
    fn append_request_with_a_flipped_byte_never_panics(at in 0_usize..400, flip in 1_u8..) {
        let mut bytes = append_request_to_wire(&append()).encode_to_vec();
        let at = at % bytes.len();
        bytes[at] ^= flip;
        if let Ok(wire) = internal::AppendRequest::decode(Bytes::from(bytes)) {
            let _ = append_request_from_wire(wire);
        }
    }
}
