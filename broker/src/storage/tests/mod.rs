//! Tests of the whole layer, on the simulated and the real file system.

#![allow(
    clippy::cast_possible_truncation,
    reason = "stamps of test frames and sizes of test files"
)]

mod basic;
mod crash;
mod damage;
mod data_dir;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;

use bytes::Bytes;
use futures::executor::block_on;
use qute_proto::ids::{PartitionId, ReplicaId, TopicId};
use uuid::Uuid;

use super::*;
use crate::env::SimFs;

const DIR: &str = "/data";

fn key(replica: u64) -> ReplicaKey {
    ReplicaKey {
        partition: PartitionId {
            topic: TopicId(Uuid::from_u128(7)),
            partition: 3,
        },
        replica: ReplicaId(replica),
    }
}

/// Where the files of `key(replica)` are.
fn dir_of(replica: u64) -> PathBuf {
    Path::new(DIR)
        .join("topics")
        .join(Uuid::from_u128(7).to_string())
        .join(format!("3-{replica}"))
}

fn segment_of(replica: u64, base: u64) -> PathBuf {
    dir_of(replica).join(format!("{base:020}.log"))
}

fn config(fs: &SimFs) -> StoreConfig {
    StoreConfig {
        fs: Arc::new(fs.clone()),
        write_ahead: false,
        ..StoreConfig::new(DIR)
    }
}

fn open(fs: &SimFs) -> Store {
    Store::open(config(fs)).unwrap()
}

fn small() -> LogConfig {
    LogConfig {
        segment_bytes: LogConfig::SEGMENT_BYTES_MIN,
        durability: Durability::Disk,
    }
}

fn batch(term: u64, index: u64, payload: impl Into<Bytes>) -> NewFrame {
    NewFrame {
        term,
        index,
        kind: FrameKind::Batch,
        broker_time_ms: 1000 + index,
        records: 2,
        payload: payload.into(),
    }
}

/// Appends and waits until it is done.
fn append(log: &Log, frames: Vec<NewFrame>) -> Result<(), Error> {
    begin(log, frames)?.recv().unwrap()
}

fn begin(log: &Log, frames: Vec<NewFrame>) -> Result<mpsc::Receiver<Result<(), Error>>, Error> {
    let (done, receiver) = mpsc::channel();
    log.append(frames, move |outcome| {
        let _ = done.send(outcome);
    })?;
    Ok(receiver)
}

fn fill(log: &Log, term: u64, count: u64, bytes: usize) {
    for _ in 0..count {
        let index = log.next_index();
        append(log, vec![batch(term, index, vec![index as u8; bytes])]).unwrap();
    }
}

/// Index, term and first payload byte of everything readable.
fn content(log: &Log) -> Vec<(u64, u64, Option<u8>)> {
    let (first, next) = (log.first_index(), log.next_index());
    let frames = log.read(first..next, usize::MAX / 2).unwrap();
    assert_eq!(frames.len() as u64, next - first);
    frames
        .iter()
        .map(|frame| (frame.index, frame.term, frame.payload.first().copied()))
        .collect()
}

fn close(store: Store) {
    block_on(store.shutdown());
}
