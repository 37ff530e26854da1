//! The file-system seam.
//!
//! It sits *below* every format: nothing here knows frames or segments. The durability contract
//! that callers may rely on, and that [`super::SimFs`] enforces against them:
//!
//! - bytes written are durable after a successful [`File::sync_data`] and not before;
//! - a name created, renamed or removed is durable after [`Fs::sync_dir`] of its directory;
//! - until then any subset of the written sectors may be found after a power cut;
//! - after a failed sync the file must not be trusted again: a second sync proves nothing.

use std::io::{self, IoSlice};
use std::path::Path;
use std::sync::Arc;

/// One name in a directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DirEntry {
    /// The last path component. Names that are not UTF-8 are shown lossily.
    pub name: String,
    /// Whether it is a directory.
    pub is_dir: bool,
}

/// Space of the file system that holds a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Space {
    /// What an unprivileged process may still use.
    pub available_bytes: u64,
    /// Size of the file system.
    pub total_bytes: u64,
}

/// Holds an exclusive lock until dropped.
pub trait LockGuard: Send + Sync {}

/// An open file, readable and writable at positions. Safe to share between threads.
pub trait File: Send + Sync + 'static {
    /// Reads up to `buf.len()` bytes at `at`; fewer only at the end of the file.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize>;

    /// Writes all of `bufs`, one after another, at `at`. The slices may be advanced.
    ///
    /// # Errors
    /// Whatever the file system reports; how much was written is then unknown.
    fn write_all_at(&self, bufs: &mut [IoSlice<'_>], at: u64) -> io::Result<()>;

    /// Makes everything written so far durable, and as much metadata as reading it back needs.
    ///
    /// # Errors
    /// After an error the file's unsynced content is unknown for good (S4).
    fn sync_data(&self) -> io::Result<()>;

    /// Cuts or extends (with zeros) the file.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// Length in bytes.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn len(&self) -> io::Result<u64>;

    /// Whether the file has no bytes.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
}

/// A file system.
pub trait Fs: Send + Sync + 'static {
    /// Makes a file that does not exist yet.
    ///
    /// # Errors
    /// `AlreadyExists`, or whatever the file system reports.
    fn create_new(&self, path: &Path) -> io::Result<Arc<dyn File>>;

    /// Opens a file that exists.
    ///
    /// # Errors
    /// `NotFound`, or whatever the file system reports.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn File>>;

    /// Renames, replacing `to`.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// `NotFound`, or whatever the file system reports.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes one directory; its parent exists.
    ///
    /// # Errors
    /// `AlreadyExists`, or whatever the file system reports.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// The names in a directory, sorted.
    ///
    /// # Errors
    /// `NotFound`, or whatever the file system reports.
    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>>;

    /// Makes creations, renames and removals in this directory durable.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Whether something has this name.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn exists(&self, path: &Path) -> io::Result<bool>;

    /// Takes an exclusive lock on a file, which is made when absent. Does not wait.
    ///
    /// # Errors
    /// `WouldBlock` when another holds it, or whatever the file system reports.
    fn lock(&self, path: &Path) -> io::Result<Box<dyn LockGuard>>;

    /// Space of the file system that holds `path`.
    ///
    /// # Errors
    /// Whatever the file system reports.
    fn space(&self, path: &Path) -> io::Result<Space>;
}

/// Reads exactly `buf.len()` bytes.
///
/// # Errors
/// `UnexpectedEof` when the file ends before that, or whatever the file system reports.
pub fn read_exact_at(file: &dyn File, buf: &mut [u8], at: u64) -> io::Result<()> {
    if file.read_at(buf, at)? == buf.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}

/// Reads a whole file that must not be larger than `bytes_max`.
///
/// # Errors
/// `InvalidData` when it is larger, or whatever the file system reports.
pub fn read_all(fs: &dyn Fs, path: &Path, bytes_max: usize) -> io::Result<Vec<u8>> {
    let file = fs.open(path)?;
    let len = usize::try_from(file.len()?).unwrap_or(usize::MAX);
    if len > bytes_max {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{len} bytes, at most {bytes_max} expected"),
        ));
    }
    let mut bytes = vec![0; len];
    read_exact_at(file.as_ref(), &mut bytes, 0)?;
    Ok(bytes)
}

/// Removes a file that may be gone already.
///
/// # Errors
/// Whatever the file system reports, except that there is no such file.
pub fn remove_if_there(fs: &dyn Fs, path: &Path) -> io::Result<()> {
    match fs.remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Puts a whole small file in place: written beside, synced, renamed, directory synced (S5).
///
/// # Errors
/// Whatever the file system reports; the old content, if any, is then still there.
pub fn write_atomically(fs: &dyn Fs, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".tmp");
    let beside = Path::new(&beside);
    remove_if_there(fs, beside)?;
    let file = fs.create_new(beside)?;
    file.write_all_at(&mut [IoSlice::new(bytes)], 0)?;
    file.sync_data()?;
    fs.rename(beside, path)?;
    match path.parent() {
        Some(parent) => fs.sync_dir(parent),
        None => Ok(()),
    }
}
