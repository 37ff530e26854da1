//! An in-memory file system that behaves like the worst one allowed.
//!
//! A power cut ([`SimFs::crash`]) keeps what was synced, and of the rest a random subset drawn
//! from a seed: single 512-byte sectors of unsynced writes (so writes tear and later ones may
//! survive earlier ones), and a prefix of each directory's unsynced changes. A failed sync drops
//! the unsynced pages from the disk while reads still show them, as kernels do. Space can run
//! out, and any operation can be told to fail ([`Fault`]).
//!
//! The same seed and the same sequence of operations give the same disk.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use super::fs::{DirEntry, File, Fs, LockGuard, Space};

const SECTOR: usize = 512;
const ENOSPC: i32 = 28;

/// Which operation a [`Fault`] hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultOp {
    /// Reading file content.
    Read,
    /// Writing file content.
    Write,
    /// `sync_data`.
    Sync,
    /// `sync_dir`.
    SyncDir,
    /// Creating a file or directory.
    Create,
    /// Renaming.
    Rename,
    /// Removing.
    Remove,
}

/// Makes operations fail.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The operation that fails.
    pub op: FaultOp,
    /// Only on paths that contain this text.
    pub path_contains: String,
    /// How many matching operations succeed first.
    pub skip: u64,
    /// How many fail then.
    pub times: u64,
    /// The error number, for example 5 for EIO.
    pub errno: i32,
}

/// See the module's documentation. A clone is the same disk.
#[derive(Clone)]
pub struct SimFs {
    disk: Arc<Mutex<Disk>>,
}

#[derive(Clone)]
enum Pending {
    Write { at: usize, bytes: Vec<u8> },
    SetLen(usize),
}

#[derive(Clone, Default)]
struct Content {
    durable: Vec<u8>,
    current: Vec<u8>,
    pending: Vec<Pending>,
}

#[derive(Clone)]
enum Node {
    File(Content),
    Dir,
}

#[derive(Clone)]
enum NameOp {
    Link(PathBuf, u64),
    Unlink(PathBuf),
    Rename(PathBuf, PathBuf, u64),
}

struct Disk {
    nodes: HashMap<u64, Node>,
    node_next: u64,
    names: BTreeMap<PathBuf, u64>,
    names_durable: BTreeMap<PathBuf, u64>,
    name_ops: HashMap<PathBuf, Vec<NameOp>>,
    locks: BTreeSet<PathBuf>,
    faults: Vec<Fault>,
    rng: StdRng,
    capacity_bytes: u64,
    used_bytes: u64,
    written_bytes: u64,
    syncs: u64,
    changes_left: Option<u64>,
    off: bool,
}

fn power_off() -> io::Error {
    io::Error::other("the simulated machine has no power")
}

fn not_found(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, path.display().to_string())
}

fn apply(content: &mut Vec<u8>, pending: &Pending) {
    match pending {
        Pending::Write { at, bytes } => {
            let end = at + bytes.len();
            if content.len() < end {
                content.resize(end, 0);
            }
            if let Some(target) = content.get_mut(*at..end) {
                target.copy_from_slice(bytes);
            }
        }
        Pending::SetLen(len) => content.resize(*len, 0),
    }
}

fn apply_name(names: &mut BTreeMap<PathBuf, u64>, op: &NameOp) {
    match op {
        NameOp::Link(path, node) => {
            names.insert(path.clone(), *node);
        }
        NameOp::Unlink(path) => {
            names.remove(path);
        }
        NameOp::Rename(from, to, node) => {
            names.remove(from);
            names.insert(to.clone(), *node);
        }
    }
}

/// Applies a random subset of the unsynced changes, sector by sector.
fn apply_torn(content: &mut Vec<u8>, pending: &[Pending], rng: &mut StdRng) {
    // Each cut draws its own temper, so that all-or-nothing outcomes are common too.
    let keep_of_8 = rng.random_range(0..=8u8);
    for change in pending {
        match change {
            Pending::Write { at, bytes } => {
                let mut start = 0;
                while start < bytes.len() {
                    let sector_end = ((at + start) / SECTOR + 1) * SECTOR - at;
                    let end = sector_end.min(bytes.len());
                    if rng.random_range(0..8u8) < keep_of_8
                        && let Some(piece) = bytes.get(start..end)
                    {
                        let piece = Pending::Write {
                            at: at + start,
                            bytes: piece.to_vec(),
                        };
                        apply(content, &piece);
                    }
                    start = end;
                }
            }
            Pending::SetLen(_) => {
                if rng.random_range(0..8u8) < keep_of_8 {
                    apply(content, change);
                }
            }
        }
    }
}

impl Disk {
    fn check(&mut self, op: FaultOp, path: &Path) -> io::Result<()> {
        if self.off {
            return Err(power_off());
        }
        if op != FaultOp::Read
            && let Some(left) = self.changes_left.as_mut()
        {
            if *left == 0 {
                self.off = true;
                return Err(power_off());
            }
            *left -= 1;
        }
        let shown = path.to_string_lossy();
        for fault in &mut self.faults {
            if fault.op != op || !shown.contains(&fault.path_contains) || fault.times == 0 {
                continue;
            }
            if fault.skip > 0 {
                fault.skip -= 1;
                continue;
            }
            fault.times -= 1;
            return Err(io::Error::from_raw_os_error(fault.errno));
        }
        Ok(())
    }

    fn require_parent(&self, path: &Path) -> io::Result<PathBuf> {
        let parent = path.parent().unwrap_or(Path::new("/")).to_path_buf();
        if parent == Path::new("/") {
            return Ok(parent);
        }
        match self.names.get(&parent).and_then(|id| self.nodes.get(id)) {
            Some(Node::Dir) => Ok(parent),
            _ => Err(not_found(&parent)),
        }
    }

    fn change_name(&mut self, dir: PathBuf, op: NameOp) {
        apply_name(&mut self.names, &op);
        self.name_ops.entry(dir).or_default().push(op);
    }

    fn content(&mut self, node: u64) -> io::Result<&mut Content> {
        match self.nodes.get_mut(&node) {
            Some(Node::File(content)) => Ok(content),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn link_new(&mut self, path: &Path, node: Node) -> io::Result<u64> {
        self.check(FaultOp::Create, path)?;
        let parent = self.require_parent(path)?;
        if self.names.contains_key(path) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let id = self.node_next;
        self.node_next += 1;
        self.nodes.insert(id, node);
        self.change_name(parent, NameOp::Link(path.to_path_buf(), id));
        Ok(id)
    }
}

impl SimFs {
    /// An empty disk whose outcomes are drawn from `seed`. `/` exists.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            disk: Arc::new(Mutex::new(Disk {
                nodes: HashMap::new(),
                node_next: 1,
                names: BTreeMap::new(),
                names_durable: BTreeMap::new(),
                name_ops: HashMap::new(),
                locks: BTreeSet::new(),
                faults: Vec::new(),
                rng: StdRng::seed_from_u64(seed),
                capacity_bytes: u64::MAX,
                used_bytes: 0,
                written_bytes: 0,
                syncs: 0,
                changes_left: None,
                off: false,
            })),
        }
    }

    /// Cuts the power: this disk refuses everything from now on, and what a machine would find
    /// after the cut is returned as a new disk.
    #[must_use]
    pub fn crash(&self) -> Self {
        let mut disk = self.disk.lock();
        disk.off = true;
        let mut rng = StdRng::seed_from_u64(disk.rng.random());
        let mut names = disk.names_durable.clone();
        let mut dirs: Vec<_> = disk.name_ops.iter().collect();
        dirs.sort_by(|a, b| a.0.cmp(b.0));
        for (_, ops) in dirs {
            let kept = rng.random_range(0..=ops.len());
            for op in ops.iter().take(kept) {
                apply_name(&mut names, op);
            }
        }
        // A name whose directory did not survive is not there.
        let mut reachable: BTreeMap<PathBuf, u64> = BTreeMap::new();
        for (path, node) in names {
            let parent = path.parent().unwrap_or(Path::new("/"));
            if parent == Path::new("/") || reachable.contains_key(parent) {
                reachable.insert(path, node);
            }
        }
        let mut nodes = HashMap::new();
        let mut used_bytes = 0;
        for id in reachable.values() {
            let node = match disk.nodes.get(id) {
                Some(Node::File(content)) => {
                    let mut durable = content.durable.clone();
                    apply_torn(&mut durable, &content.pending, &mut rng);
                    used_bytes += durable.len() as u64;
                    Node::File(Content {
                        current: durable.clone(),
                        durable,
                        pending: Vec::new(),
                    })
                }
                Some(Node::Dir) => Node::Dir,
                None => continue,
            };
            nodes.insert(*id, node);
        }
        let fresh = Disk {
            nodes,
            node_next: disk.node_next,
            names: reachable.clone(),
            names_durable: reachable,
            name_ops: HashMap::new(),
            locks: BTreeSet::new(),
            faults: Vec::new(),
            rng,
            capacity_bytes: disk.capacity_bytes,
            used_bytes,
            written_bytes: disk.written_bytes,
            syncs: disk.syncs,
            changes_left: None,
            off: false,
        };
        Self {
            disk: Arc::new(Mutex::new(fresh)),
        }
    }

    /// Makes operations fail from now on.
    pub fn inject(&self, fault: Fault) {
        self.disk.lock().faults.push(fault);
    }

    /// Lets operations succeed again.
    pub fn clear_faults(&self) {
        self.disk.lock().faults.clear();
    }

    /// Lets `changes` more changing operations through, then the power goes.
    pub fn power_off_after(&self, changes: u64) {
        self.disk.lock().changes_left = Some(changes);
    }

    /// Whether the power is off.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.disk.lock().off
    }

    /// Limits the bytes that files may hold together.
    pub fn set_capacity(&self, bytes: u64) {
        self.disk.lock().capacity_bytes = bytes;
    }

    /// Changes the content of a file behind everybody's back, durably.
    ///
    /// # Errors
    /// When there is no such file.
    pub fn damage(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) -> io::Result<()> {
        let mut disk = self.disk.lock();
        let id = *disk.names.get(path).ok_or_else(|| not_found(path))?;
        let content = disk.content(id)?;
        change(&mut content.current);
        content.durable.clone_from(&content.current);
        content.pending.clear();
        Ok(())
    }

    /// All file paths, sorted.
    #[must_use]
    pub fn files(&self) -> Vec<PathBuf> {
        let disk = self.disk.lock();
        disk.names
            .iter()
            .filter(|(_, id)| matches!(disk.nodes.get(id), Some(Node::File(_))))
            .map(|(path, _)| path.clone())
            .collect()
    }

    /// Bytes given to writes so far, and the number of file syncs.
    #[must_use]
    pub fn written(&self) -> (u64, u64) {
        let disk = self.disk.lock();
        (disk.written_bytes, disk.syncs)
    }
}

struct SimFile {
    disk: Arc<Mutex<Disk>>,
    node: u64,
    path: PathBuf,
}

struct SimLock {
    disk: Arc<Mutex<Disk>>,
    path: PathBuf,
}

impl LockGuard for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.disk.lock().locks.remove(&self.path);
    }
}

impl SimFile {
    fn change(&self, change: Pending) -> io::Result<()> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Write, &self.path)?;
        let (free, len) = {
            let free = disk.capacity_bytes.saturating_sub(disk.used_bytes);
            (free, disk.content(self.node)?.current.len())
        };
        let len_after = match &change {
            Pending::Write { at, bytes } => len.max(at + bytes.len()),
            Pending::SetLen(len) => *len,
        };
        if let Pending::Write { bytes, .. } = &change {
            if (len_after.saturating_sub(len)) as u64 > free {
                return Err(io::Error::from_raw_os_error(ENOSPC));
            }
            disk.written_bytes += bytes.len() as u64;
        }
        disk.used_bytes = (disk.used_bytes + len_after as u64).saturating_sub(len as u64);
        let content = disk.content(self.node)?;
        apply(&mut content.current, &change);
        content.pending.push(change);
        Ok(())
    }
}

fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

impl File for SimFile {
    fn read_at(&self, buf: &mut [u8], at: u64) -> io::Result<usize> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Read, &self.path)?;
        let content = disk.content(self.node)?;
        let available = content.current.get(index(at)..).unwrap_or_default();
        let read = available.len().min(buf.len());
        if let (Some(to), Some(from)) = (buf.get_mut(..read), available.get(..read)) {
            to.copy_from_slice(from);
        }
        Ok(read)
    }

    fn write_all_at(&self, bufs: &mut [IoSlice<'_>], at: u64) -> io::Result<()> {
        let bytes = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        self.change(Pending::Write {
            at: index(at),
            bytes,
        })
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut disk = self.disk.lock();
        let checked = disk.check(FaultOp::Sync, &self.path);
        if disk.off {
            return Err(power_off());
        }
        disk.syncs += 1;
        let seed = disk.rng.random();
        let content = disk.content(self.node)?;
        let pending = std::mem::take(&mut content.pending);
        if checked.is_err() {
            // The kernel forgets the dirty pages; reads still show them.
            let mut rng = StdRng::seed_from_u64(seed);
            apply_torn(&mut content.durable, &pending, &mut rng);
            return checked;
        }
        for change in &pending {
            apply(&mut content.durable, change);
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Pending::SetLen(index(len)))
    }

    fn len(&self) -> io::Result<u64> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Read, &self.path)?;
        Ok(disk.content(self.node)?.current.len() as u64)
    }
}

impl Fs for SimFs {
    fn create_new(&self, path: &Path) -> io::Result<Arc<dyn File>> {
        let node = self
            .disk
            .lock()
            .link_new(path, Node::File(Content::default()))?;
        Ok(Arc::new(SimFile {
            disk: Arc::clone(&self.disk),
            node,
            path: path.to_path_buf(),
        }))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn File>> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Read, path)?;
        let node = *disk.names.get(path).ok_or_else(|| not_found(path))?;
        disk.content(node)?;
        Ok(Arc::new(SimFile {
            disk: Arc::clone(&self.disk),
            node,
            path: path.to_path_buf(),
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Rename, from)?;
        let node = *disk.names.get(from).ok_or_else(|| not_found(from))?;
        let dir = disk.require_parent(to)?;
        if from.parent() != to.parent() {
            return Err(io::Error::other("renames stay in their directory"));
        }
        disk.change_name(
            dir,
            NameOp::Rename(from.to_path_buf(), to.to_path_buf(), node),
        );
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Remove, path)?;
        let node = *disk.names.get(path).ok_or_else(|| not_found(path))?;
        let len = disk.content(node)?.current.len() as u64;
        disk.used_bytes = disk.used_bytes.saturating_sub(len);
        let dir = disk.require_parent(path)?;
        disk.change_name(dir, NameOp::Unlink(path.to_path_buf()));
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Remove, path)?;
        if !disk.names.contains_key(path) {
            return Err(not_found(path));
        }
        if disk.names.keys().any(|name| name.parent() == Some(path)) {
            return Err(io::ErrorKind::DirectoryNotEmpty.into());
        }
        let dir = disk.require_parent(path)?;
        disk.change_name(dir, NameOp::Unlink(path.to_path_buf()));
        Ok(())
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.disk.lock().link_new(path, Node::Dir).map(|_| ())
    }

    fn read_dir(&self, path: &Path) -> io::Result<Vec<DirEntry>> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Read, path)?;
        if path != Path::new("/") && !disk.names.contains_key(path) {
            return Err(not_found(path));
        }
        Ok(disk
            .names
            .iter()
            .filter(|(name, _)| name.parent() == Some(path))
            .map(|(name, id)| DirEntry {
                name: name
                    .file_name()
                    .map(|name| name.to_string_lossy().into_owned())
                    .unwrap_or_default(),
                is_dir: matches!(disk.nodes.get(id), Some(Node::Dir)),
            })
            .collect())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::SyncDir, path)?;
        let ops = disk.name_ops.remove(path).unwrap_or_default();
        for op in &ops {
            apply_name(&mut disk.names_durable, op);
        }
        Ok(())
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        let mut disk = self.disk.lock();
        disk.check(FaultOp::Read, path)?;
        Ok(path == Path::new("/") || disk.names.contains_key(path))
    }

    fn lock(&self, path: &Path) -> io::Result<Box<dyn LockGuard>> {
        let exists = self.exists(path)?;
        if !exists {
            self.create_new(path)?;
        }
        if !self.disk.lock().locks.insert(path.to_path_buf()) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Box::new(SimLock {
            disk: Arc::clone(&self.disk),
            path: path.to_path_buf(),
        }))
    }

    fn space(&self, _path: &Path) -> io::Result<Space> {
        let disk = self.disk.lock();
        Ok(Space {
            available_bytes: disk.capacity_bytes.saturating_sub(disk.used_bytes),
            total_bytes: disk.capacity_bytes,
        })
    }
}
