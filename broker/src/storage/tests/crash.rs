//! A model of what power cuts may leave (S1, S2, S3, S5, S6), checked against the production code on
//! the simulated disk: torn and lost unsynced writes, lost unsynced names.
//!
//! Operations of one log take effect in the order of submission. So what is found after a cut must be
//! the state after some prefix of the operations that includes all acknowledged ones, where the last
//! append may be there in part. Nothing else: no acknowledged entry lost, no truncated one back, no
//! vote forgotten, and an honest disk is never called damaged.

use std::collections::HashMap;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::env::{Fault, FaultOp};

#[derive(Debug, Clone)]
enum Act {
    /// Frames of these sizes in one call.
    Append(Vec<u16>),
    /// Several calls at once, answered later.
    Burst(Vec<u16>),
    /// Keep this part (of 256) of the unpurged log.
    Truncate(u8),
    Vote,
    /// Checkpoint and purge this part (of 256) of the log.
    Purge(u8),
    /// Let the next append begin a segment.
    Roll,
    /// Checkpoint everything, roll, and purge this part (of 256) of the log: how logs of commands are
    /// cut.
    Cut(u8),
    /// Install a snapshot so far beyond the end.
    Reset(u8),
    Commit,
}

fn act() -> impl Strategy<Value = Act> {
    let sizes = || prop::collection::vec(prop_oneof![0u16..200, 200u16..5000], 1..6);
    prop_oneof![
        5 => sizes().prop_map(Act::Append),
        4 => sizes().prop_map(Act::Burst),
        3 => any::<u8>().prop_map(Act::Truncate),
        2 => Just(Act::Vote),
        1 => any::<u8>().prop_map(Act::Purge),
        1 => Just(Act::Roll),
        2 => any::<u8>().prop_map(Act::Cut),
        1 => any::<u8>().prop_map(Act::Reset),
        1 => Just(Act::Commit),
    ]
}

#[derive(Debug, Clone)]
struct Life {
    acts: Vec<Act>,
    /// The power goes after so many changes to the disk.
    changes: u64,
    /// The sync so far ahead fails (counted over all files).
    sync_fails_after: Option<u64>,
    /// The next life begins without a power cut: a new process on the same machine.
    process_only: bool,
}

fn life() -> impl Strategy<Value = Life> {
    (
        prop::collection::vec(act(), 1..25),
        prop_oneof![0u64..40, 0u64..400],
        prop::option::weighted(0.2, 0u64..60),
        prop::bool::weighted(0.25),
    )
        .prop_map(|(acts, changes, sync_fails_after, process_only)| Life {
            acts,
            changes,
            sync_fails_after,
            process_only,
        })
}

/// What a log holds: the model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Model {
    /// (index, term, stamp) of what can be read.
    entries: Vec<(u64, u64, u64)>,
    purged: Option<Position>,
    vote: Option<VoteRecord>,
}

impl Model {
    fn next_index(&self) -> u64 {
        self.entries.last().map_or_else(
            || self.purged.map_or(0, |purged| purged.index + 1),
            |last| last.0 + 1,
        )
    }

    fn of(log: &Log) -> Self {
        let (first, next) = (log.first_index(), log.next_index());
        let frames = log.read(first..next, usize::MAX / 2).unwrap();
        assert_eq!(frames.len() as u64, next - first);
        Self {
            entries: frames
                .iter()
                .map(|frame| (frame.index, frame.term, frame.broker_time_ms))
                .collect(),
            purged: log.purged(),
            vote: log.vote(),
        }
    }
}

/// All states that a cut may leave, from the last acknowledged one on.
struct History {
    states: Vec<Model>,
    stamp: u64,
    term: u64,
    /// What a checkpoint covers is committed: Raft never cuts it.
    floor: u64,
    /// Broker times of entries and of installed snapshots' last ones.
    times: HashMap<Position, u64>,
}

impl History {
    fn newest(&self) -> Model {
        self.states.last().unwrap().clone()
    }

    /// The clock of a log stands at its last entry, also when a snapshot brought it (S19).
    fn check_time(&self, log: &Log) {
        let expected = log.last().map_or(0, |last| self.times[&last]);
        assert_eq!(log.last_time_ms(), expected);
    }

    fn acknowledged(&mut self) {
        self.states.drain(..self.states.len() - 1);
    }

    fn frame(&mut self, size: u16) -> NewFrame {
        self.stamp += 1;
        let mut next = self.newest();
        let index = next.next_index();
        next.entries.push((index, self.term, self.stamp));
        let at = Position {
            term: self.term,
            index,
        };
        self.times.insert(at, self.stamp);
        self.states.push(next);
        NewFrame {
            broker_time_ms: self.stamp,
            ..batch(self.term, index, vec![self.stamp as u8; size as usize])
        }
    }
}

fn run(history: &mut History, log: &Log, act: &Act) -> Result<(), Error> {
    match act {
        Act::Append(sizes) => {
            let frames = sizes.iter().map(|size| history.frame(*size)).collect();
            append(log, frames)?;
        }
        Act::Burst(sizes) => {
            let mut answers = Vec::new();
            for size in sizes {
                let frame = history.frame(*size);
                answers.push(begin(log, vec![frame])?);
            }
            for answer in answers {
                answer.recv().unwrap()?;
            }
        }
        Act::Truncate(part) => {
            let mut next = history.newest();
            let kept = next.entries.len() * usize::from(*part) / 256;
            let floor = history.floor;
            let mut number = 0;
            next.entries.retain(|(index, ..)| {
                number += 1;
                number <= kept || *index < floor
            });
            let last = next.next_index().checked_sub(1);
            history.states.push(next);
            history.term += 1;
            block_on(log.truncate_after(last))?;
        }
        Act::Vote => {
            history.term += 1;
            let vote = VoteRecord {
                term: history.term,
                voted_for: Some(history.term % 3),
                committed: history.term.is_multiple_of(2),
            };
            let mut next = history.newest();
            next.vote = Some(vote);
            history.states.push(next);
            block_on(log.save_vote(vote))?;
        }
        Act::Purge(part) => purge(history, log, *part, |gone| gone)?,
        Act::Roll => log.roll(),
        Act::Cut(part) => {
            purge(history, log, *part, |_| {
                log.last().map_or(0, |last| last.index)
            })?;
            log.roll();
        }
        Act::Reset(ahead) => {
            history.term += 1;
            let mut next = history.newest();
            let at = Position {
                term: history.term,
                index: next.next_index() + u64::from(*ahead),
            };
            next.entries.clear();
            next.purged = Some(at);
            history.states.push(next);
            history.stamp += 1;
            let time_ms = history.stamp;
            history.times.insert(at, time_ms);
            let state = Bytes::copy_from_slice(&at.index.to_le_bytes());
            block_on(log.reset_to(at, (at.index + 1) * 2, time_ms, state))?;
        }
        Act::Commit => {
            if let Some(last) = log.last() {
                log.save_committed(last);
            }
        }
    }
    history.acknowledged();
    Ok(())
}

/// Purges this part (of 256) of the log; the checkpoint that covers it is made where `covered` says.
fn purge(
    history: &mut History,
    log: &Log,
    part: u8,
    covered: impl FnOnce(u64) -> u64,
) -> Result<(), Error> {
    let mut next = history.newest();
    let gone = next.entries.len() * usize::from(part) / 256;
    if gone == 0 {
        return Ok(());
    }
    let last = next.entries[gone - 1];
    let at = Position {
        term: last.1,
        index: last.0,
    };
    next.entries.drain(..gone);
    next.purged = Some(at);
    let covered = covered(at.index);
    history.floor = history.floor.max(covered + 1);
    log.save_checkpoint(covered, &covered.to_le_bytes())?;
    history.states.push(next);
    block_on(log.purge(at))
}

fn check(
    lives: &[Life],
    seed: u64,
    config_of: &dyn Fn(&SimFs) -> StoreConfig,
    log_config: LogConfig,
) {
    let mut fs = SimFs::new(seed);
    let store = Store::open(config_of(&fs)).unwrap();
    drop(store.create_log(key(1), log_config).unwrap());
    close(store);
    let mut history = History {
        states: vec![Model::default()],
        stamp: 0,
        term: 1,
        floor: 0,
        times: HashMap::new(),
    };
    for (number, life) in lives.iter().enumerate() {
        // Opening is part of what a cut may interrupt.
        fs.power_off_after(life.changes);
        if let Some(skip) = life.sync_fails_after {
            fs.inject(Fault {
                op: FaultOp::Sync,
                path_contains: "/topics/".into(),
                skip,
                times: 1,
                errno: 5,
            });
        }
        let opened = Store::open(config_of(&fs))
            .and_then(|store| Ok((store.open_log(key(1), log_config)?, store)));
        match opened {
            Ok((log, store)) => {
                let found = Model::of(&log);
                assert!(
                    history.states.contains(&found),
                    "life {number}: {found:#?}\nallowed: {:#?}",
                    history.states
                );
                history.check_time(&log);
                history.states = vec![found];
                for act in &life.acts {
                    if run(&mut history, &log, act).is_err() {
                        break;
                    }
                    history.check_time(&log);
                }
                drop(log);
                close(store);
            }
            Err(error) => {
                assert!(
                    matches!(error, Error::Io { .. } | Error::Failed { .. }),
                    "life {number}: {error}"
                );
            }
        }
        fs = if life.process_only && !fs.is_off() {
            fs.power_off_after(u64::MAX);
            fs.clear_faults();
            fs
        } else {
            fs.crash()
        };
    }
    let store = Store::open(config_of(&fs)).unwrap();
    let log = store.open_log(key(1), log_config).unwrap();
    let found = Model::of(&log);
    assert!(
        history.states.contains(&found),
        "at the end: {found:#?}\nallowed: {:#?}",
        history.states
    );
    history.check_time(&log);
    // Offsets are a pure function of the log: two records an entry.
    for frame in log
        .read(log.first_index()..log.next_index(), usize::MAX / 2)
        .unwrap()
    {
        assert_eq!(frame.base_offset, frame.index * 2);
    }
    let stray = fs
        .files()
        .into_iter()
        .filter(|path| path.extension() == Some("tmp".as_ref()));
    assert_eq!(stray.collect::<Vec<_>>(), Vec::<PathBuf>::new());
    assert!(
        fs.files()
            .iter()
            .all(|path| path.starts_with(Path::new(DIR)))
    );
}

/// Memory durability promises nothing but order: what is found is a prefix, votes come after their
/// data (S5), sealed segments are whole (S2), and it is never called damage.
#[test]
fn memory_log_after_power_cut_is_a_prefix() {
    for seed in 0..60 {
        let fs = SimFs::new(seed);
        let store = open(&fs);
        let memory = LogConfig {
            durability: Durability::Memory,
            ..small()
        };
        let log = store.create_log(key(1), memory).unwrap();
        let vote = VoteRecord {
            term: 1,
            voted_for: None,
            committed: false,
        };
        let (mut voted_at, votes_from) = (0, seed % 20);
        for index in 0..40 {
            append(&log, vec![batch(1, index, vec![1; 300])]).unwrap();
            if index % 20 == votes_from {
                block_on(log.save_vote(VoteRecord {
                    term: index,
                    ..vote
                }))
                .unwrap();
                voted_at = index + 1;
            }
        }
        let crashed = fs.crash();
        let store = open(&crashed);
        let log = store.open_log(key(1), memory).unwrap();
        assert!(log.next_index() >= voted_at, "seed {seed}");
        assert_eq!(log.vote().unwrap().term + 1, voted_at);
        assert_eq!(content(&log).len() as u64, log.next_index());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn log_after_power_cuts_is_a_prefix_with_everything_acknowledged(
        lives in prop::collection::vec(life(), 1..8),
        seed in any::<u64>(),
        large in any::<bool>(),
    ) {
        let log_config = LogConfig {
            segment_bytes: if large { 48 << 10 } else { LogConfig::SEGMENT_BYTES_MIN },
            durability: Durability::Disk,
        };
        let config_of = |fs: &SimFs| StoreConfig {
            write_ahead: large,
            tail_cache_bytes: 3000,
            open_files_max: 2,
            ..config(fs)
        };
        check(&lives, seed, &config_of, log_config);
    }
}
