//! Torn tails are cut, damage is quarantined, failures are final (S2, S3, S4, S6, S7).

use super::*;
use crate::env::{Fault, FaultOp, Fs as _};

/// A log of 30 entries, each of its own flush round, in some segments. Returns the bases.
fn thirty(fs: &SimFs, config: LogConfig) -> Vec<u64> {
    let store = open(fs);
    let log = store.create_log(key(1), config).unwrap();
    fill(&log, 1, 30, 300);
    let bases = log.segment_bases();
    drop(log);
    close(store);
    bases
}

fn one_segment() -> LogConfig {
    LogConfig {
        segment_bytes: 1 << 20,
        ..small()
    }
}

/// Bytes of one stored entry of [`thirty`].
const STORED: usize = 72 + 304;
const HEADER: usize = 128;

fn reopen(fs: &SimFs, config: LogConfig) -> Result<Arc<Log>, Error> {
    // The store lives on in its logs' flusher; a leaked one holds the lock of a disk that is dropped.
    let store = open(fs);
    let log = store.open_log(key(1), config);
    std::mem::forget(store);
    log
}

fn reason_of(outcome: Result<Arc<Log>, Error>) -> String {
    match outcome {
        Err(Error::Quarantined { reason, .. }) => reason,
        other => panic!("not quarantined: {other:?}"),
    }
}

#[test]
fn s2_bit_flip_with_a_later_round_behind_it_is_quarantined() {
    for at in [
        HEADER + 3 * STORED + 100,
        HEADER + 3 * STORED + 20,
        HEADER + 10 * STORED + 8,
    ] {
        let fs = SimFs::new(1);
        thirty(&fs, one_segment());
        fs.damage(&segment_of(1, 0), |bytes| bytes[at] ^= 4)
            .unwrap();
        let reason = reason_of(reopen(&fs, one_segment()));
        assert!(reason.contains("is damaged at position"), "{reason}");
    }
}

#[test]
fn s2_zero_hole_with_a_later_round_behind_it_is_not_the_end() {
    let fs = SimFs::new(1);
    thirty(&fs, one_segment());
    let (from, to) = (HEADER + 5 * STORED, HEADER + 9 * STORED);
    fs.damage(&segment_of(1, 0), |bytes| bytes[from..to].fill(0))
        .unwrap();
    let reason = reason_of(reopen(&fs, one_segment()));
    assert!(
        reason.contains("index 5 was to follow, and index 9"),
        "{reason}"
    );
}

#[test]
fn s2_broken_last_round_is_a_torn_tail_and_is_cut() {
    let fs = SimFs::new(1);
    thirty(&fs, one_segment());
    fs.damage(&segment_of(1, 0), |bytes| {
        bytes[HEADER + 29 * STORED + 90] ^= 1
    })
    .unwrap();
    let log = reopen(&fs, one_segment()).unwrap();
    assert_eq!(log.next_index(), 29);
    fill(&log, 2, 3, 300);
    assert_eq!(content(&log).len(), 32);
}

#[test]
fn s2_holes_within_the_last_round_are_a_torn_tail() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), one_segment()).unwrap();
    fill(&log, 1, 5, 300);
    append(
        &log,
        (5..20).map(|index| batch(1, index, vec![1; 300])).collect(),
    )
    .unwrap();
    drop(log);
    close(store);
    let (from, to) = (HEADER + 7 * STORED, HEADER + 9 * STORED);
    fs.damage(&segment_of(1, 0), |bytes| bytes[from..to].fill(0))
        .unwrap();
    let log = reopen(&fs, one_segment()).unwrap();
    assert_eq!(
        log.next_index(),
        7,
        "the whole frames behind the hole prove nothing"
    );
}

#[test]
fn s1_end_below_a_mark_or_checkpoint_is_quarantined() {
    for by_checkpoint in [true, false] {
        let fs = SimFs::new(1);
        let store = open(&fs);
        let log = store.create_log(key(1), one_segment()).unwrap();
        fill(&log, 1, 30, 300);
        if by_checkpoint {
            log.save_checkpoint(29, b"state").unwrap();
        } else {
            log.save_committed(Position { term: 1, index: 29 });
        }
        drop(log);
        close(store);
        fs.damage(&segment_of(1, 0), |bytes| {
            bytes[HEADER + 29 * STORED + 90] ^= 1
        })
        .unwrap();
        let reason = reason_of(reopen(&fs, one_segment()));
        assert!(reason.contains("the log ends before index 29"), "{reason}");
    }
}

#[test]
fn s2_damage_in_a_sealed_segment_is_quarantined_or_refused_when_read() {
    let fs = SimFs::new(1);
    let bases = thirty(&fs, small());
    fs.damage(&segment_of(1, bases[1]), |bytes| {
        bytes[HEADER + 2 * STORED + 100] ^= 4
    })
    .unwrap();
    // Its index says where it ends, so it opens; the damaged entry is never served.
    let log = reopen(&fs, small()).unwrap();
    let index = bases[1] + 2;
    assert!(
        matches!(log.read(index..index + 1, 1000), Err(Error::Damaged { .. })),
        "S7"
    );
    assert_eq!(
        log.read(index + 1..30, 100_000).unwrap().len() as u64,
        29 - index
    );
    drop(log);
    // Without its index it is read whole.
    let again = SimFs::new(2);
    let bases = thirty(&again, small());
    let segment = segment_of(1, bases[1]);
    again
        .damage(&segment, |bytes| bytes[HEADER + 2 * STORED + 100] ^= 4)
        .unwrap();
    again.remove_file(&segment.with_extension("idx")).unwrap();
    let reason = reason_of(reopen(&again, small()));
    assert!(reason.contains("is damaged at position"), "{reason}");
}

#[test]
fn index_absent_or_wrong_is_rebuilt() {
    for damage in [0, 1, 2, 3] {
        let fs = SimFs::new(1);
        let bases = thirty(&fs, small());
        let index = segment_of(1, bases[1]).with_extension("idx");
        match damage {
            0 => fs.remove_file(&index).unwrap(),
            1 => fs.damage(&index, |bytes| bytes[40] ^= 1).unwrap(),
            2 => fs.damage(&index, |bytes| bytes.truncate(113)).unwrap(),
            _ => fs
                .damage(&index, |bytes| *bytes.last_mut().unwrap() ^= 1)
                .unwrap(),
        }
        let log = reopen(&fs, small()).unwrap();
        assert_eq!(content(&log).len(), 30, "damage {damage}");
        assert_eq!(
            log.read_offsets(bases[1] * 2 + 3, 60, 1).unwrap()[0].index,
            bases[1] + 1
        );
    }
}

#[test]
fn missing_or_misplaced_segment_is_quarantined() {
    let fs = SimFs::new(1);
    let bases = thirty(&fs, small());
    fs.remove_file(&segment_of(1, bases[1])).unwrap();
    let reason = reason_of(reopen(&fs, small()));
    assert!(reason.contains("is damaged"), "{reason}");

    let fs = SimFs::new(1);
    thirty(&fs, small());
    fs.remove_file(&segment_of(1, 0)).unwrap();
    let reason = reason_of(reopen(&fs, small()));
    assert!(reason.contains("the log at 0"), "{reason}");

    let fs = SimFs::new(1);
    let bases = thirty(&fs, small());
    fs.rename(&segment_of(1, bases[2]), &segment_of(1, bases[2] + 1))
        .unwrap();
    let reason = reason_of(reopen(&fs, small()));
    assert!(reason.contains("misplaced"), "{reason}");
}

#[test]
fn s3_truncated_frames_left_in_the_file_never_come_back() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), one_segment()).unwrap();
    fill(&log, 1, 10, 300);
    block_on(log.truncate_after(Some(4))).unwrap();
    // Written over with one entry of the same size: entries 6.. of the old rounds are still there.
    fill(&log, 2, 1, 300);
    drop(log);
    close(store);
    let log = reopen(&fs, one_segment()).unwrap();
    assert_eq!(log.last(), Some(Position { term: 2, index: 5 }));
    drop(log);
    // The same when what was written over them is torn: no evidence, no link.
    fs.damage(&segment_of(1, 0), |bytes| bytes[HEADER + 5 * STORED] ^= 1)
        .unwrap();
    let again = fs.crash();
    let log = reopen(&again, one_segment()).unwrap();
    assert_eq!(log.last(), Some(Position { term: 1, index: 4 }));
}

#[test]
fn s4_failed_sync_is_final_for_appends_and_votes() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    let other = store.create_log(key(2), small()).unwrap();
    fill(&log, 1, 3, 10);
    fs.inject(Fault {
        op: FaultOp::Sync,
        path_contains: "3-1/".into(),
        skip: 0,
        times: 1,
        errno: 5,
    });
    let vote = VoteRecord {
        term: 9,
        voted_for: None,
        committed: false,
    };
    assert!(matches!(
        append(&log, vec![batch(1, 3, vec![1])]),
        Err(Error::Failed { .. })
    ));
    assert!(*log.failed().borrow());
    assert!(matches!(
        append(&log, vec![batch(1, 4, vec![1])]),
        Err(Error::Failed { .. })
    ));
    assert!(matches!(
        block_on(log.save_vote(vote)),
        Err(Error::Failed { .. })
    ));
    assert!(matches!(log.read(0..1, 1), Err(Error::Failed { .. })));
    assert!(matches!(
        log.save_checkpoint(1, b""),
        Err(Error::Failed { .. })
    ));
    drop(log);
    let again = store.open_log(key(1), small());
    assert!(
        matches!(again, Err(Error::Failed { .. })),
        "for the whole process"
    );
    // The others go on.
    fill(&other, 1, 3, 10);
    block_on(other.save_vote(vote)).unwrap();
    drop(other);
    close(store);
    let log = reopen(&fs, small()).unwrap();
    assert!(log.next_index() >= 3);
    assert_eq!(log.vote(), None, "the vote was never saved");
}

#[test]
fn s4_log_failing_during_an_append_keeps_nothing_in_memory() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    // The append that has passed its first check when the failure comes is the one of interest.
    for replica in 1..=20 {
        let log = store.create_log(key(replica), one_segment()).unwrap();
        fill(&log, 1, 1, 10);
        let appends = std::thread::spawn({
            let log = Arc::clone(&log);
            let payload = Bytes::from(vec![1; 64 << 10]);
            move || while begin(&log, vec![batch(1, log.next_index(), payload.clone())]).is_ok() {}
        });
        log.core.fail("test".into());
        appends.join().unwrap();
        assert_eq!(log.stats().cached_bytes, 0, "replica {replica}");
    }
    assert_eq!(store.cached_bytes(), 0);
}

#[test]
fn s4_failed_meta_log_fails_every_replica() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    let other = store.create_log(key(2), small()).unwrap();
    fs.inject(Fault {
        op: FaultOp::Sync,
        path_contains: "/meta/".into(),
        skip: 0,
        times: 1,
        errno: 5,
    });
    let vote = VoteRecord {
        term: 9,
        voted_for: None,
        committed: false,
    };
    assert!(block_on(log.save_vote(vote)).is_err());
    assert!(block_on(other.save_vote(vote)).is_err());
    assert!(append(&other, vec![batch(1, 0, vec![1])]).is_err());
    assert!(store.put_blob("x", Bytes::new()).is_err());
}

#[test]
fn s4_reserve_refuses_before_append_would_meet_a_full_disk() {
    let fs = SimFs::new(1);
    fs.set_capacity(4 << 20);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    let mut appended = 0;
    loop {
        let Ok(held) = log.reserve(10_000) else {
            break;
        };
        let index = log.next_index();
        append(&log, vec![batch(1, index, vec![1; 10_000])]).unwrap();
        drop(held);
        appended += 1;
    }
    assert!(appended > 200, "{appended}");
    let full = log.reserve(10_000).unwrap_err();
    assert!(
        full.floor_bytes > 80_000 && full.available_bytes < full.floor_bytes + 20_000,
        "{full}"
    );
    // What a leader admitted fits its followers, down to half of what is kept back.
    drop(log.reserve_admitted(2, 20_000).unwrap());
    let deeper = log.reserve_admitted(1, full.available_bytes - full.floor_bytes / 2);
    assert_eq!(deeper.unwrap_err().floor_bytes, full.floor_bytes / 2);
    assert!(Error::from(full).is_retriable());
    // What nobody asked for may use what is kept back.
    let blank = NewFrame {
        kind: FrameKind::Blank,
        records: 0,
        ..batch(2, log.next_index(), Bytes::new())
    };
    append(&log, vec![blank]).unwrap();
    block_on(log.save_vote(VoteRecord {
        term: 2,
        voted_for: None,
        committed: true,
    }))
    .unwrap();
    // Space that comes back is granted again.
    fs.set_capacity(8 << 20);
    drop(log.reserve(10_000).unwrap());
}

#[test]
fn s4_promises_count_until_they_are_dropped() {
    let fs = SimFs::new(1);
    fs.set_capacity(10 << 20);
    let store = open(&fs);
    let first = store.reserve(6 << 20).unwrap();
    assert!(store.reserve(6 << 20).is_err());
    drop(first);
    drop(store.reserve(6 << 20).unwrap());
}

#[test]
fn s4_promises_for_appends_end_when_the_log_fails() {
    // On the way to the file, at the roll before, and still in the queue.
    for op in [FaultOp::Write, FaultOp::Create, FaultOp::Sync] {
        let fs = SimFs::new(1);
        let store = open(&fs);
        let log = store.create_log(key(1), small()).unwrap();
        fill(&log, 1, 1, 3000);
        fs.inject(Fault {
            op,
            path_contains: "3-1/".into(),
            skip: 0,
            times: 1,
            errno: 5,
        });
        // Each begins a segment of its own.
        let frames = (1..20).map(|index| batch(1, index, vec![1; 3000]));
        assert!(append(&log, frames.collect()).is_err());
        assert_eq!(log.core.shared.space.promised(), 0, "{op:?}");
    }
}

#[test]
fn s6_listed_replica_without_directory_is_quarantined() {
    let fs = SimFs::new(1);
    thirty(&fs, small());
    for path in fs.files() {
        if path.starts_with(dir_of(1)) {
            fs.remove_file(&path).unwrap();
        }
    }
    let reason = reason_of(reopen(&fs, small()));
    assert!(reason.contains("no segment"), "{reason}");
    let fs = fs.crash();
    for path in fs.files() {
        if path.starts_with(dir_of(1)) {
            fs.remove_file(&path).unwrap();
        }
    }
    fs.remove_dir(&dir_of(1)).unwrap();
    let reason = reason_of(reopen(&fs, small()));
    assert!(reason.contains("is missing"), "{reason}");
}

#[test]
fn s6_damaged_meta_log_refuses_everything() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    for term in 1..5 {
        block_on(log.save_vote(VoteRecord {
            term,
            voted_for: None,
            committed: false,
        }))
        .unwrap();
    }
    drop(log);
    close(store);
    let meta = fs
        .files()
        .into_iter()
        .find(|path| path.starts_with("/data/meta"))
        .unwrap();
    let len = fs.open(&meta).unwrap().len().unwrap() as usize;
    // Anything but the last record.
    for at in [3, 20, 60, len - 200] {
        let copy = SimFs::new(2);
        copy_disk(&fs, &copy);
        copy.damage(&meta, |bytes| bytes[at] ^= 1).unwrap();
        let error = Store::open(config(&copy)).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::DataDirDamaged { .. }),
            "at {at}: {text}"
        );
        assert!(text.contains("Restore it from where it was"), "{text}");
    }
    fs.damage(&meta, |bytes| bytes[len - 20] ^= 1).unwrap();
    let log = reopen(&fs, small()).unwrap();
    assert_eq!(log.vote().unwrap().term, 3, "a torn tail is cut");
}

fn copy_disk(from: &SimFs, to: &SimFs) {
    use std::io::IoSlice;
    let make = |path: &Path| {
        let mut dirs: Vec<_> = path
            .ancestors()
            .skip(1)
            .filter(|dir| *dir != Path::new("/"))
            .collect();
        dirs.reverse();
        for dir in dirs {
            let _ = to.create_dir(dir);
        }
        to.create_new(path).unwrap()
    };
    for path in from.files() {
        let bytes = crate::env::read_all(from, &path, usize::MAX).unwrap();
        make(&path)
            .write_all_at(&mut [IoSlice::new(&bytes)], 0)
            .unwrap();
    }
    let _ = to.create_dir(&Path::new(DIR).join("topics"));
}

#[test]
fn s9_memory_durability_completes_without_sync_and_syncs_before_a_vote() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let memory = LogConfig {
        durability: Durability::Memory,
        ..one_segment()
    };
    let log = store.create_log(key(1), memory).unwrap();
    let before = fs.written().1;
    fill(&log, 1, 5, 10);
    block_on(log.save_vote(VoteRecord {
        term: 1,
        voted_for: None,
        committed: false,
    }))
    .unwrap();
    assert_eq!(log.synced_index(), Some(4), "S5");
    assert!(
        fs.written().1 <= before + 4,
        "five appends, at most a lazy sync, one for the vote, one meta"
    );
    let crashed = fs.crash();
    let log = reopen(&crashed, memory).unwrap();
    assert_eq!(log.next_index(), 5);
    assert!(log.vote().is_some());
}

#[test]
fn files_open_are_capped() {
    let fs = SimFs::new(1);
    let store = Store::open(StoreConfig {
        open_files_max: 3,
        tail_cache_bytes: 0,
        ..config(&fs)
    })
    .unwrap();
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 200, 500);
    drop(log);
    let log = store.open_log(key(1), small()).unwrap();
    assert_eq!(content(&log).len(), 200);
    assert!(log.core.shared.files.len() <= 3);
    assert_eq!(store.cached_bytes(), 0);
}
