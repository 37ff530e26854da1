//! The happy path.

use super::*;

#[test]
fn log_appended_reopened_reads_the_same() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 50, 300);
    let before = content(&log);
    assert_eq!(log.last(), Some(Position { term: 1, index: 49 }));
    assert_eq!(log.next_offset(), 100);
    assert_eq!(log.synced_index(), Some(49));
    let bases = log.segment_bases();
    assert!(bases.len() > 3, "{bases:?}");
    assert_eq!(log.active_base(), *bases.last().unwrap());
    assert!(store.cached_bytes() > 0);
    drop(log);
    close(store);

    let store = open(&fs);
    assert_eq!(store.boot(), 2);
    assert_eq!(store.replicas(), [key(1)]);
    let log = store.open_log(key(1), small()).unwrap();
    assert_eq!(content(&log), before);
    assert_eq!(log.segment_bases(), bases);
    assert_eq!(log.next_offset(), 100);
    fill(&log, 2, 10, 300);
    assert_eq!(log.term_at(49), Some(1));
    assert_eq!(log.term_at(50), Some(2));
    assert_eq!(log.term_at(60), None);
    assert_eq!(content(&log).len(), 60);
}

#[test]
fn read_offsets_from_the_middle_of_a_batch_begins_with_it() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 30, 300);
    let blank = NewFrame {
        kind: FrameKind::Blank,
        records: 0,
        ..batch(2, 30, Bytes::new())
    };
    append(&log, vec![blank, batch(2, 31, vec![9; 10])]).unwrap();
    let check = |log: &Log| {
        for offset in 0..62 {
            let frames = log.read_offsets(offset, 62, 1).unwrap();
            assert_eq!(frames.len(), 1, "offset {offset}");
            assert_eq!(frames[0].base_offset, offset / 2 * 2);
        }
        assert!(log.read_offsets(62, 62, 1).unwrap().is_empty());
        let all = log.read_offsets(1, 62, usize::MAX / 2).unwrap();
        assert_eq!(all.len(), 31);
        assert!(all.iter().all(|frame| frame.kind == FrameKind::Batch));
        assert_eq!(log.read_offsets(1, 60, usize::MAX / 2).unwrap().len(), 30);
        assert_eq!(log.read_offsets(0, 62, 900).unwrap().len(), 3);
        for (time, expected) in [
            (0, Some(0)),
            (1000, Some(0)),
            (1001, Some(2)),
            (1030, Some(60)),
            (1031, Some(60)),
            (1032, None),
        ] {
            assert_eq!(
                log.offset_at_time(time, 62).unwrap(),
                expected,
                "time {time}"
            );
        }
        assert_eq!(log.offset_at_time(1031, 60).unwrap(), None);
    };
    check(&log);
    drop(log);
    close(store);
    let store = open(&fs);
    let log = store.open_log(key(1), small()).unwrap();
    check(&log);
}

#[test]
fn append_out_of_order_is_refused() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 2, 10);
    let refused = log.append(vec![batch(1, 3, vec![1])], |_| unreachable!());
    assert!(matches!(
        refused,
        Err(Error::NotContiguous {
            expected: 2,
            found: 3,
            ..
        })
    ));
    assert_eq!(log.next_index(), 2);
}

#[test]
fn votes_and_blobs_saved_survive_reopening() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    let vote = VoteRecord {
        term: 4,
        voted_for: Some(2),
        committed: true,
    };
    assert_eq!(log.vote(), None);
    block_on(log.save_vote(vote)).unwrap();
    fill(&log, 4, 3, 10);
    log.save_committed(Position { term: 4, index: 9 });
    assert_eq!(log.committed(), Some(Position { term: 4, index: 2 }), "S1");
    store
        .put_blob("cluster", Bytes::from_static(b"id"))
        .unwrap();
    drop(log);
    close(store);
    let store = open(&fs);
    assert_eq!(store.get_blob("cluster").as_deref(), Some(&b"id"[..]));
    let log = store.open_log(key(1), small()).unwrap();
    assert_eq!(log.vote(), Some(vote));
    assert_eq!(log.committed(), Some(Position { term: 4, index: 2 }));
}

#[test]
fn truncate_after_reaching_back_over_segments_goes_on_from_there() {
    for reopen in [false, true] {
        let fs = SimFs::new(1);
        let store = open(&fs);
        let log = store.create_log(key(1), small()).unwrap();
        fill(&log, 1, 40, 300);
        block_on(log.truncate_after(Some(14))).unwrap();
        assert_eq!(log.last(), Some(Position { term: 1, index: 14 }));
        assert_eq!(log.next_offset(), 30);
        let (log, _store) = if reopen {
            drop(log);
            close(store);
            let store = open(&fs);
            (store.open_log(key(1), small()).unwrap(), store)
        } else {
            (log, store)
        };
        fill(&log, 2, 30, 200);
        let expected: Vec<_> = (0..45u64)
            .map(|index| (index, if index < 15 { 1 } else { 2 }, Some(index as u8)))
            .collect();
        assert_eq!(content(&log), expected);
        block_on(log.truncate_after(None)).unwrap();
        assert_eq!(log.last(), None);
        assert_eq!(log.next_offset(), 0);
        fill(&log, 3, 5, 100);
        assert_eq!(content(&log).len(), 5);
        drop(log);
        close(_store);
        let store = open(&fs);
        let log = store.open_log(key(1), small()).unwrap();
        assert_eq!(content(&log).len(), 5);
        assert_eq!(log.term_at(4), Some(3));
    }
}

#[test]
fn purge_with_a_checkpoint_removes_whole_segments() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 40, 300);
    let at = Position { term: 1, index: 25 };
    assert!(
        matches!(block_on(log.purge(at)), Err(Error::OutOfOrder { .. })),
        "S1"
    );
    assert!(
        matches!(
            log.save_checkpoint(40, b"no"),
            Err(Error::OutOfOrder { .. })
        ),
        "S1"
    );
    log.save_checkpoint(30, b"state").unwrap();
    block_on(log.purge(at)).unwrap();
    assert_eq!(log.purged(), Some(at));
    assert_eq!(log.term_at(25), Some(1));
    assert_eq!(log.term_at(24), None);
    assert!(log.read(25..40, 1 << 20).unwrap().is_empty());
    assert_eq!(content(&log).len(), 14);
    assert!(log.segment_bases()[0] > 0);
    drop(log);
    close(store);
    assert!(!fs.files().contains(&segment_of(1, 0)));
    let store = open(&fs);
    let log = store.open_log(key(1), small()).unwrap();
    assert_eq!(content(&log).len(), 14);
    assert_eq!(
        log.checkpoints().unwrap(),
        [(30, Bytes::from_static(b"state"))]
    );
    assert_eq!(log.last(), Some(Position { term: 1, index: 39 }));
}

#[test]
fn tail_budget_forgets_appends_whose_frames_purges_took() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    // Never purged: it stays the oldest.
    let quiet = store.create_log(key(1), small()).unwrap();
    fill(&quiet, 1, 1, 10);
    let busy = store.create_log(key(2), small()).unwrap();
    for round in 1..=50 {
        fill(&busy, 1, 100, 10);
        let at = busy.last().unwrap();
        busy.save_checkpoint(at.index, b"state").unwrap();
        block_on(busy.purge(at)).unwrap();
        let kept = busy.core.shared.budget.len();
        assert!(kept <= 1024, "round {round}: {kept}");
    }
    assert_eq!(content(&quiet).len(), 1);
    fill(&busy, 1, 1, 10);
    assert_eq!(quiet.cached_from(), 0);
    assert!(store.cached_bytes() > 0);
}

#[test]
fn reset_to_installs_and_begins_after_the_snapshot() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 20, 300);
    log.save_checkpoint(10, b"old").unwrap();
    let at = Position { term: 3, index: 99 };
    block_on(log.reset_to(at, 500, 900, Bytes::from_static(b"new"))).unwrap();
    let check = |log: &Log| {
        assert_eq!(log.last(), Some(at));
        assert_eq!(log.purged(), Some(at));
        assert_eq!(log.next_offset(), 500);
        // Not that of the entries before, which were later.
        assert_eq!(log.last_time_ms(), 900, "S19");
        assert_eq!(
            log.checkpoints().unwrap(),
            [(99, Bytes::from_static(b"new"))]
        );
    };
    check(&log);
    drop(log);
    close(store);
    let store = open(&fs);
    let log = store.open_log(key(1), small()).unwrap();
    check(&log);
    fill(&log, 3, 5, 300);
    assert_eq!(log.next_offset(), 510);
    assert_eq!(content(&log).len(), 5);
}

#[test]
fn delete_log_spends_the_id_and_removes_the_files() {
    let fs = SimFs::new(1);
    let store = open(&fs);
    let log = store.create_log(key(1), small()).unwrap();
    fill(&log, 1, 20, 300);
    store.delete_log(key(1)).unwrap();
    assert!(matches!(
        append(&log, vec![batch(1, 20, vec![1])]),
        Err(Error::Failed { .. })
    ));
    assert!(store.replicas().is_empty());
    assert!(fs.files().iter().all(|path| !path.starts_with(dir_of(1))));
    drop(log);
    let again = store.create_log(key(1), small());
    assert!(matches!(again, Err(Error::Conflict { .. })), "S9");
    store.create_log(key(2), small()).unwrap();
}

#[test]
fn log_on_the_real_file_system_written_ahead_reopens() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig::new(dir.path().join("a/b"));
    let log_config = LogConfig {
        segment_bytes: 1 << 20,
        ..LogConfig::default()
    };
    let store = Store::open(config.clone()).unwrap();
    let again = Store::open(config.clone());
    assert!(matches!(again, Err(Error::Locked { .. })));
    let log = store.create_log(key(1), log_config).unwrap();
    fill(&log, 1, 100, 50_000);
    let last = append(&log, vec![batch(1, 100, vec![7; 3 << 20])]);
    assert!(
        last.is_ok(),
        "a frame larger than a segment has one of its own"
    );
    let before = content(&log);
    drop(log);
    close(store);
    let store = Store::open(config).unwrap();
    let log = store.open_log(key(1), log_config).unwrap();
    assert_eq!(content(&log), before);
    assert!(log.segment_bases().len() >= 5);
}
