//! The bytes of a checkpoint.

use proptest::prelude::*;
use qute_proto::v1::Join;

use super::super::Groups;
use super::fixture::*;

/// Two groups: one with members, claims and every part of a slot, one with an offset only.
fn log() -> Log {
    let mut log = Log {
        time_ms: 1_000_000,
        ..Log::default()
    };
    log.does(joins(Join {
        rack: "r".to_owned(),
        ..join_as(0, "w")
    }));
    log.does(joins(join(1)));
    log.does(subscribes(1, &[(0, 301)]));
    log.does(publishes(0, 3, &[(0, &[0]), (1, &[300])]));
    let mut with_metadata = commit(0, 1, 10);
    with_metadata.metadata = "x".to_owned();
    log.does(commits(0, vec![with_metadata]));
    log.does(named("idle", commits_alone(vec![commit(7, 0, 300)])));
    log
}

#[test]
fn checkpoint_has_its_golden_bytes() {
    let hex: String = log()
        .groups
        .encode()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let golden = [
        // version, time, one topic
        "01c6843d0100000000000000000000000000001000",
        // two groups; `billing`: generation 3, assigned 3, revision 4
        "020762696c6c696e6703030400",
        // two members; the first at epoch 1: w, r, m0, 10,000 ms, revision 4
        "02000000000000000000000000000020000101770172026d30904e04",
        // its assignor and its topic
        "0106737469636b7901010004",
        // the second
        "00000000000000000000000000002001010000026d31904e04",
        "0106737469636b79010100ad02",
        // one topic, two slots: partition 0, held and targeted by 0, epoch 1, offset 10 with metadata
        "010002001f0000010a03010178",
        // partition 300, of member 1
        "ab0207010101",
        // `idle`: revision 6, no members, partition 7 at offset 300
        "0469646c6500000600000100010708ac020300",
    ];
    assert_eq!(hex, golden.concat());
}

#[test]
fn checkpoint_is_restored_to_the_same_bytes() {
    let bytes = log().groups.encode();
    assert_eq!(Groups::decode(&bytes).unwrap().encode(), bytes);
    let empty = Groups::default().encode();
    assert_eq!(Groups::decode(&empty).unwrap().encode(), empty);
}

#[test]
fn checkpoint_of_a_newer_version_is_refused() {
    let mut bytes = log().groups.encode().to_vec();
    bytes[0] = 2;
    let error = Groups::decode(&bytes).unwrap_err();
    assert!(error.to_string().contains("version 2"), "{error}");
}

#[test]
fn checkpoint_that_is_cut_or_goes_on_is_refused() {
    let bytes = log().groups.encode();
    for length in 0..bytes.len() {
        assert!(Groups::decode(&bytes[..length]).is_err(), "{length}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(Groups::decode(&longer).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Groups::decode(&bytes);
        let _ = Groups::decode(&[&[1], &bytes[..]].concat());
    }

    // Whatever is taken is a state: it can be written, and read again.
    #[test]
    fn damaged_checkpoint_is_refused_or_is_a_state(
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut bytes = log().groups.encode().to_vec();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(groups) = Groups::decode(&bytes) {
            let again = groups.encode();
            prop_assert_eq!(Groups::decode(&again).unwrap().encode(), again);
        }
    }
}
