//! What can go wrong in storage, typed by what the caller does about it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::types::ReplicaKey;

/// An error of the storage layer. Cheap to clone: one failed round answers many appends.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused. Final for the log that met it, when it was a write (S4).
    #[error("{op} {path}: {source}", path = path.display())]
    Io {
        /// What was being done.
        op: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        source: Arc<io::Error>,
    },

    /// Another process uses the data directory.
    #[error(
        "data directory {path} is in use by another process: stop that broker, \
         or give this one its own --data-dir", path = path.display()
    )]
    Locked {
        /// The data directory.
        path: PathBuf,
    },

    /// A later release wrote the data directory.
    #[error(
        "data directory {path} has format version {found}, this release reads up to {supported}: \
         run the newer release that wrote it", path = path.display()
    )]
    NewerVersion {
        /// The data directory.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// What this release reads.
        supported: u64,
    },

    /// The directory is not a data directory, and not empty either.
    #[error(
        "{path} is not a Qute data directory (it holds '{found}' and has no VERSION file): \
         choose an empty or a new directory", path = path.display()
    )]
    NotADataDir {
        /// The directory.
        path: PathBuf,
        /// Something that is in it.
        found: String,
    },

    /// A file that says what the data directory is cannot be believed.
    #[error(
        "data directory {path} is damaged: {reason}. Nothing was changed. Restore it from where \
         it was, or start this broker with an empty directory: it then joins as a new broker and \
         its replicas are copied from their peers", path = path.display()
    )]
    DataDirDamaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// The file system has no room to start.
    #[error(
        "the file system of {path} is full ({available_bytes} bytes left, {needed_bytes} needed \
         to start): free some space, then start again", path = path.display()
    )]
    DiskFull {
        /// The data directory.
        path: PathBuf,
        /// What is left.
        available_bytes: u64,
        /// What is needed at least.
        needed_bytes: u64,
    },

    /// No space may be promised: the caller refuses its request, retriably (S4).
    #[error(transparent)]
    Full(#[from] Full),

    /// A replica whose files contradict what was promised: never served, never cut (S7).
    #[error("replica {replica} is quarantined: {reason}")]
    Quarantined {
        /// The replica.
        replica: ReplicaKey,
        /// What was found, and where.
        reason: String,
    },

    /// A write or sync of this replica failed earlier in this process: final (S4).
    #[error("replica {replica} has stopped: {reason}")]
    Failed {
        /// The replica.
        replica: ReplicaKey,
        /// The first failure.
        reason: String,
    },

    /// What was read back is not what was written.
    #[error("replica {replica} is damaged: {reason}")]
    Damaged {
        /// The replica.
        replica: ReplicaKey,
        /// Where and how.
        reason: String,
    },

    /// An append that does not continue the log.
    #[error("replica {replica}: index {found} does not follow, {expected} is next")]
    NotContiguous {
        /// The replica.
        replica: ReplicaKey,
        /// The next index.
        expected: u64,
        /// The index given.
        found: u64,
    },

    /// A frame beyond what the format holds.
    #[error("replica {replica}: a payload of {bytes} bytes, at most {bytes_max}")]
    TooLarge {
        /// The replica.
        replica: ReplicaKey,
        /// Its payload.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },

    /// A mark or checkpoint that would run ahead of the synced log (S1).
    #[error("replica {replica}: index {index} is refused: {reason}")]
    OutOfOrder {
        /// The replica.
        replica: ReplicaKey,
        /// The index of the mark.
        index: u64,
        /// Why not.
        reason: String,
    },

    /// The meta log does not list it.
    #[error("replica {replica} is not on this broker")]
    UnknownReplica {
        /// The replica.
        replica: ReplicaKey,
    },

    /// It exists, is open, or was removed: a replica id is spent once (S9).
    #[error("replica {replica}: {reason}")]
    Conflict {
        /// The replica.
        replica: ReplicaKey,
        /// What stands in the way.
        reason: &'static str,
    },

    /// A setting that cannot work.
    #[error("{0}")]
    Config(String),

    /// The store was shut down.
    #[error("storage is shut down")]
    Closed,
}

/// No space may be promised without going below the disk floor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "storage full: {wanted_bytes} bytes wanted, {available_bytes} free, {floor_bytes} of them kept back"
)]
pub struct Full {
    /// What was asked for.
    pub wanted_bytes: u64,
    /// What the file system has left, promises subtracted.
    pub available_bytes: u64,
    /// What is never promised.
    pub floor_bytes: u64,
}

impl Error {
    pub(super) fn io(op: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            op,
            path: path.to_path_buf(),
            source: Arc::new(source),
        }
    }

    /// Whether trying again later can help without anybody doing anything.
    #[must_use]
    pub fn is_retriable(&self) -> bool {
        matches!(self, Self::Full(_))
    }

    pub(super) fn is_no_space(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull)
    }
}

/// Names the file in an I/O error.
pub(super) trait At<T> {
    fn at(self, op: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, op: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::io(op, path, source))
    }
}
