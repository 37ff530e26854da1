//! How much memory and how many bytes many groups take; times are printed, not judged.
//!
//! `cargo test -p qute-broker --lib groups::state::tests::measures -- --nocapture`. Optimized, on
//! two shared cores: see docs/BENCH.md.

use std::time::Instant;

use super::super::{At, Groups};
use super::fixture::*;

const GROUPS: u64 = 10_000;
const PARTITIONS: u32 = 10;

/// Every group has one member that holds ten partitions and has committed all of them twice.
fn many() -> Groups {
    let mut groups = Groups::default();
    let mut index = 0;
    let mut apply = |command| {
        index += 1;
        let time_ms = 1_700_000_000_000 + index;
        let reply = groups.apply(At { index, time_ms }, command).reply;
        assert_eq!(reply.code, 0, "{}", reply.message);
        assert!(reply.offsets.iter().all(|it| it.error.is_none()));
    };
    let all: Vec<u32> = (0..PARTITIONS).collect();
    for number in 0..GROUPS {
        let name = format!("group-{number:05}");
        let mut join = join(0);
        join.topics = subscription(&[(0, PARTITIONS)]);
        apply(named(&name, joins(join)));
        apply(named(&name, publishes(0, 1, &[(0, &all)])));
        for round in 1..3 {
            let offset = round * (1 << 30);
            let offsets = all.iter().map(|it| commit(*it, 1, offset)).collect();
            apply(named(&name, commits(0, offsets)));
        }
    }
    groups
}

#[test]
fn ten_thousand_groups_with_ten_partitions_each_are_small() {
    let start = Instant::now();
    let groups = many();
    let applied = start.elapsed();
    let totals = groups.totals();
    assert_eq!(totals.groups, 10_000);
    assert_eq!(totals.offsets, 100_000);

    let start = Instant::now();
    let bytes = groups.encode();
    let encoded = start.elapsed();
    let start = Instant::now();
    let restored = Groups::decode(&bytes).unwrap();
    let decoded = start.elapsed();
    assert_eq!(restored.totals(), totals);

    let in_memory = totals.bytes / totals.offsets;
    let on_disk = bytes.len() / totals.offsets;
    println!(
        "100,000 offsets: {in_memory} bytes each in memory, {on_disk} in a checkpoint of {} KiB, \
         groups and members included; 40,000 commands in {applied:?}, checkpoint {encoded:?}, \
         restored in {decoded:?}",
        bytes.len() / 1024
    );
    assert!(in_memory < 128, "{in_memory}");
    assert!(on_disk < 24, "{on_disk}");
}
