//! Segment files, index, recovery, flusher, tail cache. Knows no Raft.
//!
//! | file | holds |
//! | --- | --- |
//! | `store` | opens the data directory, hands out logs |
//! | `data_dir` | lock, version, identity |
//! | `replica_dir` | making, removing, surveying directories of replicas |
//! | `log` | the handle of one log |
//! | `log_core`, `state` | what handle, flusher and readers share |
//! | `read` | reading from cache and files |
//! | `flusher`, `sync_pool`, `writer` | rounds: write, sync, answer |
//! | `background`, `ahead` | blocks written ahead, sealing, removal |
//! | `segment`, `header`, `frame`, `index`, `files` | the files of a log and their formats |
//! | `scan`, `recovery` | torn tail or damage, and opening a log |
//! | `meta`, `meta_record` | the meta log: replicas, votes, marks, blobs |
//! | `checkpoint` | checkpoint files |
//! | `space`, `cache` | promised space, memory of newest frames |
//!
//! # Invariants
//!
//! - An index is acknowledged only after its bytes are synced (durability `disk`).
//! - A flush round of a log is written only after the one before is synced (S2).
//! - Frames that are not stable yet are in memory: whoever reads finds them.
//! - Only the flusher's thread writes to segment files and the meta log, apart from the background
//!   thread's zeros behind the write position and the trimming of closed segments.

mod ahead;
mod background;
mod cache;
mod checkpoint;
mod codec;
mod data_dir;
mod error;
mod files;
mod flusher;
mod frame;
mod header;
mod index;
mod log;
mod log_core;
mod meta;
mod meta_record;
mod read;
mod recovery;
mod replica_dir;
mod scan;
mod segment;
mod shared;
mod space;
mod state;
mod store;
mod sync_pool;
#[cfg(test)]
mod tests;
mod types;
mod writer;

pub use error::{Error, Full};
pub use log::Log;
pub use space::Reservation;
pub use store::{FreeSpace, Store, StoreConfig};
pub use types::{
    Durability, Frame, FrameKind, LogConfig, LogStats, NewFrame, Position, ReplicaKey, VoteRecord,
};
