//! The data directory: who may use it, and what it is.
//!
//! ```text
//! LOCK        held by the process that uses it
//! VERSION     "1"
//! IDENTITY    "broker <16 hex digits> <8 hex digits: CRC32C of the first>"; made once
//! meta/       the meta log; it also carries the boot counter
//! topics/<topic id>/<partition>-<replica id>/    segments, indexes, checkpoints
//! ```

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qute_proto::ids::BrokerId;

use super::error::{At as _, Error};
use crate::env::{Fs, LockGuard, read_all, write_atomically};

/// The version that this release writes.
const VERSION: u64 = 1;
/// Starting writes this much at least.
const START_BYTES: u64 = 1 << 20;
const SMALL_FILE_BYTES_MAX: usize = 4096;

/// An open data directory.
pub(super) struct DataDir {
    pub path: PathBuf,
    pub identity: BrokerId,
    pub lock: Box<dyn LockGuard>,
}

impl DataDir {
    pub(super) fn meta(path: &Path) -> PathBuf {
        path.join("meta")
    }

    pub(super) fn topics(path: &Path) -> PathBuf {
        path.join("topics")
    }

    /// Locks, checks, and on the first start makes the directory.
    pub(super) fn open(fs: &Arc<dyn Fs>, path: &Path) -> Result<Self, Error> {
        let fs = fs.as_ref();
        open(fs, path).map_err(|error| full_disk(fs, path, error))
    }
}

/// Running out of space at the start is said in one clear sentence.
pub(super) fn full_disk(fs: &dyn Fs, path: &Path, error: Error) -> Error {
    if !error.is_no_space() {
        return error;
    }
    Error::DiskFull {
        path: path.to_path_buf(),
        available_bytes: fs.space(path).map_or(0, |space| space.available_bytes),
        needed_bytes: START_BYTES,
    }
}

fn open(fs: &dyn Fs, path: &Path) -> Result<DataDir, Error> {
    create_dirs(fs, path)?;
    let names: Vec<String> = fs
        .read_dir(path)
        .at("list", path)?
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    let has = |name: &str| names.iter().any(|found| found == name);
    // A directory that is not ours is left untouched, lock file included.
    if !has("VERSION")
        && let Some(stranger) = names
            .iter()
            .find(|name| !["LOCK", "VERSION.tmp", "lost+found"].contains(&name.as_str()))
    {
        return Err(Error::NotADataDir {
            path: path.to_path_buf(),
            found: stranger.clone(),
        });
    }
    let lock_path = path.join("LOCK");
    let lock = fs.lock(&lock_path).map_err(|error| {
        if error.kind() == io::ErrorKind::WouldBlock {
            Error::Locked {
                path: path.to_path_buf(),
            }
        } else {
            Error::io("lock", &lock_path, error)
        }
    })?;
    if has("VERSION") {
        check_version(fs, path)?;
    }
    let space = fs.space(path).at("measure the space of", path)?;
    if space.available_bytes < START_BYTES {
        return Err(Error::DiskFull {
            path: path.to_path_buf(),
            available_bytes: space.available_bytes,
            needed_bytes: START_BYTES,
        });
    }
    if !has("VERSION") {
        let version = path.join("VERSION");
        write_atomically(fs, &version, format!("{VERSION}\n").as_bytes()).at("write", &version)?;
    }
    for dir in [DataDir::meta(path), DataDir::topics(path)] {
        if !fs.exists(&dir).at("look for", &dir)? {
            if has("IDENTITY") {
                return Err(damaged(&dir, "it is missing"));
            }
            fs.create_dir(&dir).at("create", &dir)?;
            fs.sync_dir(path).at("sync", path)?;
        }
    }
    let identity = identity(fs, path)?;
    Ok(DataDir {
        path: path.to_path_buf(),
        identity,
        lock,
    })
}

fn damaged(path: &Path, reason: &str) -> Error {
    Error::DataDirDamaged {
        path: path.to_path_buf(),
        reason: reason.to_owned(),
    }
}

fn create_dirs(fs: &dyn Fs, path: &Path) -> Result<(), Error> {
    if fs.exists(path).at("look for", path)? {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|parent| *parent != Path::new("")) {
        create_dirs(fs, parent)?;
    }
    match fs.create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.at("create", path)?,
    }
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    fs.sync_dir(parent).at("sync", parent)
}

fn check_version(fs: &dyn Fs, path: &Path) -> Result<(), Error> {
    let file = path.join("VERSION");
    let bytes = read_all(fs, &file, SMALL_FILE_BYTES_MAX).at("read", &file)?;
    let version = std::str::from_utf8(&bytes)
        .ok()
        .and_then(|text| text.trim().parse::<u64>().ok())
        .ok_or_else(|| damaged(&file, "it does not hold a number"))?;
    if version > VERSION {
        return Err(Error::NewerVersion {
            path: path.to_path_buf(),
            found: version,
            supported: VERSION,
        });
    }
    if version == 0 {
        return Err(damaged(&file, "there was never a version 0"));
    }
    Ok(())
}

/// S9: the broker id is made with the directory.
fn identity(fs: &dyn Fs, path: &Path) -> Result<BrokerId, Error> {
    let file = path.join("IDENTITY");
    if fs.exists(&file).at("look for", &file)? {
        let bytes = read_all(fs, &file, SMALL_FILE_BYTES_MAX).at("read", &file)?;
        return parse_identity(&bytes)
            .ok_or_else(|| damaged(&file, "it does not hold a broker id with its checksum"));
    }
    // Made before anything else is stored: a directory with content has lost it.
    for dir in [DataDir::meta(path), DataDir::topics(path)] {
        if !fs.read_dir(&dir).at("list", &dir)?.is_empty() {
            return Err(damaged(&file, "it is missing"));
        }
    }
    let id = rand::random::<u64>().max(1);
    let text = identity_text(id);
    write_atomically(fs, &file, text.as_bytes()).at("write", &file)?;
    Ok(BrokerId(id))
}

fn identity_text(id: u64) -> String {
    let digits = format!("{id:016x}");
    format!(
        "broker {digits} {:08x}\n",
        crc32c::crc32c(digits.as_bytes())
    )
}

fn parse_identity(bytes: &[u8]) -> Option<BrokerId> {
    let text = std::str::from_utf8(bytes).ok()?;
    let digits = text.strip_prefix("broker ")?.split(' ').next()?;
    let id = u64::from_str_radix(digits, 16).ok()?;
    (id != 0 && identity_text(id) == text).then_some(BrokerId(id))
}
