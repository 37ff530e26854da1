//! The store of one broker: opens the data directory, starts the flusher, hands out logs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use qute_proto::ids::BrokerId;
use tokio::sync::oneshot;

use super::ahead::Ahead;
use super::background;
use super::cache::TailBudget;
use super::data_dir::{DataDir, full_disk};
use super::error::{At as _, Error, Full};
use super::files::FileCache;
use super::flusher::{Act, Flusher, Op, Queue};
use super::header::SegmentHeader;
use super::log::Log;
use super::log_core::LogCore;
use super::meta::{self, MetaFile};
use super::meta_record::MetaRecord;
use super::recovery;
use super::replica_dir;
use super::shared::Shared;
use super::space::{Reservation, SpaceAccount};
use super::types::{Durability, LogConfig, ReplicaKey};
use super::writer::create_segment;
use crate::env::{Fs, LockGuard, RealFs, remove_if_there};

/// The blob that counts openings (S23): the count, then a random id per opening, newest first.
const BOOT: &str = "storage/boot";
/// Openings whose ids are kept.
const OPENINGS_KEPT: usize = 1024;
/// How long holders of a handle may take to drop it before they are said to hold it.
const DROP_DEADLINE: Duration = Duration::from_secs(1);
/// How long a dropped log may take to be out of our own threads' hands.
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);

/// How to open a store.
#[derive(Clone)]
pub struct StoreConfig {
    /// The data directory; made when absent.
    pub dir: PathBuf,
    /// The file system.
    pub fs: Arc<dyn Fs>,
    /// Memory for the newest frames of all logs together. Default 64 MiB.
    pub tail_cache_bytes: u64,
    /// Sealed segment files kept open. Default 256.
    pub open_files_max: usize,
    /// Files synced at once. Default 4.
    pub sync_threads: usize,
    /// The disk floor is this or 2% of the file system, whichever is smaller. Default 1 GiB.
    pub disk_floor_bytes: u64,
    /// Whether blocks are written ahead. Default true.
    pub write_ahead: bool,
}

impl StoreConfig {
    /// The defaults on the real file system.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            fs: Arc::new(RealFs),
            tail_cache_bytes: 64 << 20,
            open_files_max: 256,
            sync_threads: 4,
            disk_floor_bytes: 1 << 30,
            write_ahead: true,
        }
    }
}

/// Free space, for status and admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeSpace {
    /// What the file system has left, promises subtracted.
    pub available_bytes: u64,
    /// What is never promised.
    pub floor_bytes: u64,
    /// Size of the file system.
    pub total_bytes: u64,
}

/// The storage of one broker. A clone is the same store.
#[derive(Clone)]
pub struct Store {
    handle: Arc<Handle>,
}

struct Handle {
    shared: Arc<Shared>,
    identity: BrokerId,
    openings: Openings,
    logs: Mutex<HashMap<ReplicaKey, Opened>>,
    running: Mutex<Option<Running>>,
    unknown: Vec<PathBuf>,
}

/// A log that was opened: what its threads share, and the handle.
#[derive(Default)]
struct Opened {
    core: Weak<LogCore>,
    handle: Weak<Log>,
}

struct Running {
    flusher: JoinHandle<()>,
    background: JoinHandle<()>,
    lock: Box<dyn LockGuard>,
}

/// How often the directory was opened, and by whom (S23).
struct Openings {
    boot: u64,
    /// The newest first; at least this opening.
    processes: Vec<u64>,
}

impl Openings {
    /// The opening after those of `stored`.
    fn next(stored: Option<&Bytes>, process: u64) -> Self {
        let numbers = stored.map_or(&[][..], |bytes| bytes.as_ref());
        let mut numbers = numbers
            .chunks_exact(8)
            .filter_map(|chunk| chunk.try_into().ok().map(u64::from_le_bytes));
        let boot = numbers.next().unwrap_or(0) + 1;
        let earlier = numbers.take(OPENINGS_KEPT - 1);
        Self {
            boot,
            processes: std::iter::once(process.max(1)).chain(earlier).collect(),
        }
    }

    fn encode(&self) -> Bytes {
        let numbers = std::iter::once(&self.boot).chain(&self.processes);
        numbers.flat_map(|number| number.to_le_bytes()).collect()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.handle.shared.dir.display())
    }
}

impl Store {
    /// Opens the data directory: locks it, checks what it is, reads the meta log and counts the
    /// opening (S23). Blocks on files.
    ///
    /// # Errors
    /// One that says what to do: see [`Error`].
    pub fn open(config: StoreConfig) -> Result<Self, Error> {
        let data_dir = DataDir::open(&config.fs, &config.dir)?;
        let fs = Arc::clone(&config.fs);
        Self::open_in(config, data_dir).map_err(|(dir, error)| full_disk(fs.as_ref(), &dir, error))
    }

    fn open_in(config: StoreConfig, data_dir: DataDir) -> Result<Self, (PathBuf, Error)> {
        let dir = data_dir.path.clone();
        Self::start(config, data_dir).map_err(|error| (dir, error))
    }

    fn start(config: StoreConfig, data_dir: DataDir) -> Result<Self, Error> {
        let fs = config.fs;
        let DataDir {
            path: dir,
            identity,
            lock,
        } = data_dir;
        let meta_dir = DataDir::meta(&dir);
        let mut found = meta::recover(fs.as_ref(), &meta_dir, identity.0)?;
        let topics = DataDir::topics(&dir);
        if found.number.is_none() && !fs.read_dir(&topics).at("list", &topics)?.is_empty() {
            // S6: the authority is gone.
            return Err(Error::DataDirDamaged {
                path: meta_dir,
                reason: "the meta log is missing".into(),
            });
        }
        let openings = Openings::next(found.state.blobs.get(BOOT), rand::random());
        let boot_bytes = openings.encode();
        found
            .state
            .apply(&MetaRecord::Blob(BOOT.to_owned(), boot_bytes));
        let number = found.number.map_or(0, |number| number + 1);
        // S23: synced before anybody hears of this opening. S4: written anew, so that nothing rests
        // on pages of a sync that failed in the run before.
        let meta_file =
            MetaFile::create(Arc::clone(&fs), &meta_dir, identity.0, number, &found.state)?;
        for stale in &found.stale {
            // One of them may have been written over and renamed.
            remove_if_there(fs.as_ref(), stale).at("remove", stale)?;
        }
        let unknown = replica_dir::survey(fs.as_ref(), &topics, &found.state)?;
        let space = SpaceAccount::open(Arc::clone(&fs), dir.clone(), config.disk_floor_bytes)?;
        let shared = Arc::new(Shared {
            fs,
            dir: dir.clone(),
            queue: Arc::new(Queue::default()),
            background: background::Background::new(config.write_ahead),
            files: FileCache::new(config.open_files_max),
            budget: TailBudget::new(config.tail_cache_bytes),
            space,
            meta: Mutex::new(found.state),
            meta_file: Mutex::new(meta_file),
            poisoned: Mutex::new(HashMap::new()),
        });
        let flusher = Flusher::new(Arc::clone(&shared), config.sync_threads);
        let flusher = std::thread::Builder::new()
            .name("storage-flusher".into())
            .spawn(move || flusher.run())
            .at("start the flusher of", &dir)?;
        let for_background = Arc::clone(&shared);
        let background = std::thread::Builder::new()
            .name("storage-background".into())
            .spawn(move || background::run(&for_background))
            .at("start the background thread of", &dir)?;
        Ok(Self {
            handle: Arc::new(Handle {
                shared,
                identity,
                openings,
                logs: Mutex::new(HashMap::new()),
                running: Mutex::new(Some(Running {
                    flusher,
                    background,
                    lock,
                })),
                unknown,
            }),
        })
    }

    /// The broker id, made with the data directory (S9).
    #[must_use]
    pub fn identity(&self) -> BrokerId {
        self.handle.identity
    }

    /// How often the data directory has been opened, this time included (S23). From 1.
    #[must_use]
    pub fn boot(&self) -> u64 {
        self.handle.openings.boot
    }

    /// Random, drawn at this opening and synced: tells it from another with the same count (S23).
    #[must_use]
    pub fn process(&self) -> u64 {
        self.handle.openings.processes.first().copied().unwrap_or(1)
    }

    /// The ids of the openings before, the newest first.
    #[must_use]
    pub fn earlier_processes(&self) -> &[u64] {
        self.handle.openings.processes.get(1..).unwrap_or_default()
    }

    /// The data directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.handle.shared.dir
    }

    /// The replicas that the meta log lists.
    #[must_use]
    pub fn replicas(&self) -> Vec<ReplicaKey> {
        self.handle
            .shared
            .meta
            .lock()
            .replicas
            .keys()
            .copied()
            .collect()
    }

    /// Directories found at the start that belong to no listed replica: kept (S22).
    #[must_use]
    pub fn unknown_dirs(&self) -> &[PathBuf] {
        &self.handle.unknown
    }

    /// Free space.
    #[must_use]
    pub fn free_space(&self) -> FreeSpace {
        self.handle.shared.space.free()
    }

    /// Memory that cached frames take.
    #[must_use]
    pub fn cached_bytes(&self) -> u64 {
        self.handle.shared.budget.used()
    }

    /// S4: promises space, or refuses.
    ///
    /// # Errors
    /// [`Full`] when granting it would go below the disk floor.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, Full> {
        self.handle.shared.space.reserve(bytes)
    }

    /// Saves a small named value, synced when this returns. Blocks.
    ///
    /// # Errors
    /// When the meta log cannot be written (S4: final).
    pub fn put_blob(&self, name: &str, bytes: Bytes) -> Result<(), Error> {
        if name == BOOT {
            return Err(Error::Config(format!("the name {name} is taken")));
        }
        self.meta(vec![MetaRecord::Blob(name.to_owned(), bytes)])
    }

    /// A value saved before.
    #[must_use]
    pub fn get_blob(&self, name: &str) -> Option<Bytes> {
        self.handle.shared.meta.lock().blobs.get(name).cloned()
    }

    fn meta(&self, records: Vec<MetaRecord>) -> Result<(), Error> {
        write_meta(&self.handle.shared, records)
    }

    fn replica_dir(&self, key: &ReplicaKey) -> PathBuf {
        replica_dir::path(&DataDir::topics(&self.handle.shared.dir), key)
    }

    /// Makes a new, empty log and opens it. Blocks on files.
    ///
    /// # Errors
    /// When the replica exists or once existed here (S9), and what the file system reports.
    pub fn create_log(&self, key: ReplicaKey, config: LogConfig) -> Result<Arc<Log>, Error> {
        check_config(&config)?;
        let shared = &self.handle.shared;
        {
            let meta = shared.meta.lock();
            if meta.replicas.contains_key(&key) {
                return Err(Error::Conflict {
                    replica: key,
                    reason: "it exists",
                });
            }
            if meta.removed.contains(&key) {
                return Err(Error::Conflict {
                    replica: key,
                    reason: "it was removed from this broker, and a replica id is spent once",
                });
            }
        }
        let fs = shared.fs.as_ref();
        let topics = DataDir::topics(&shared.dir);
        let topic = topics.join(key.partition.topic.to_string());
        let dir = self.replica_dir(&key);
        replica_dir::make_dir(fs, &topic)?;
        replica_dir::make_dir(fs, &dir)?;
        replica_dir::clear_unlisted(fs, &dir, key)?;
        create_segment(
            fs,
            &dir,
            SegmentHeader {
                replica: key.replica.0,
                base_index: 0,
                base_offset: 0,
                nonce: rand::random(),
                round_floor: 1,
                prev_term: 0,
                prev_time_ms: 0,
                prev_link: 0,
            },
        )?;
        fs.sync_dir(&topic).at("sync", &topic)?;
        fs.sync_dir(&topics).at("sync", &topics)?;
        // S6: listed only once its directory is there for good.
        self.meta(vec![MetaRecord::ReplicaAdded(key)])?;
        self.open_log(key, config)
    }

    /// Opens a listed log: recovery included, so it may read up to a segment. Blocks on files.
    ///
    /// # Errors
    /// [`Error::Quarantined`] when its files contradict what was promised (S1, S2, S6, S7),
    /// [`Error::Failed`] when it failed earlier in this process (S4).
    pub fn open_log(&self, key: ReplicaKey, config: LogConfig) -> Result<Arc<Log>, Error> {
        check_config(&config)?;
        let shared = &self.handle.shared;
        if let Some(reason) = shared.poisoned.lock().get(&key) {
            return Err(Error::Failed {
                replica: key,
                reason: reason.clone(),
            });
        }
        self.wait_closed(&key)?;
        let meta = shared.meta.lock().replicas.get(&key).cloned();
        let meta = meta.ok_or(Error::UnknownReplica { replica: key })?;
        let dir = self.replica_dir(&key);
        let note = |record| write_meta(shared, vec![record]);
        let recovered = recovery::recover(shared.fs.as_ref(), key, &dir, &meta, &note)
            .inspect_err(|error| {
                if matches!(error, Error::Quarantined { .. }) {
                    metrics::counter!("qute_storage_quarantined_total").increment(1);
                }
            })?;
        let ahead = Ahead::new(
            config.durability == Durability::Disk,
            recovered.writer.segment.id,
            recovered.writer.segment.path.clone(),
            u64::from(recovered.writer.end.pos),
            recovered.active_len,
        );
        let core = Arc::new(LogCore::new(
            key,
            dir,
            Arc::clone(shared),
            config,
            recovered.state,
            recovered.writer,
            ahead,
        ));
        let log = Log::new(Arc::clone(&core), recovered.checkpoints);
        let mut logs = self.handle.logs.lock();
        let open = logs.entry(key).or_default();
        if open.core.strong_count() > 0 {
            return Err(Error::Conflict {
                replica: key,
                reason: "it is open",
            });
        }
        *open = Opened {
            core: Arc::downgrade(&core),
            handle: Arc::downgrade(&log),
        };
        Ok(log)
    }

    /// A log whose handle was dropped may still be with the flusher, which lets go of it just after it
    /// has answered, or with the background thread. Both write to its files: waits until they don't.
    fn wait_closed(&self, key: &ReplicaKey) -> Result<(), Error> {
        let since = Instant::now();
        loop {
            let (core, deadline) = match self.handle.logs.lock().get(key) {
                Some(open) if open.handle.strong_count() > 0 => {
                    (open.core.upgrade(), DROP_DEADLINE)
                }
                Some(open) => (open.core.upgrade(), CLOSE_DEADLINE),
                None => (None, CLOSE_DEADLINE),
            };
            let Some(core) = core else {
                return Ok(());
            };
            if since.elapsed() > deadline {
                return Err(Error::Conflict {
                    replica: *key,
                    reason: "it is open",
                });
            }
            // Its answer does not matter; what counts is that the flusher is past it.
            let _ = barrier(core);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Removes a log for good: its id is spent (S9). Blocks on files. An open handle of it fails
    /// from now on. Files that are not ours stay (S22).
    ///
    /// # Errors
    /// When it is not listed, and what the file system reports; the removal is then finished at the
    /// next start.
    pub fn delete_log(&self, key: ReplicaKey) -> Result<(), Error> {
        let shared = &self.handle.shared;
        if !shared.meta.lock().replicas.contains_key(&key) {
            return Err(Error::UnknownReplica { replica: key });
        }
        let open = self.handle.logs.lock().remove(&key);
        if let Some(core) = open.and_then(|open| open.core.upgrade()) {
            core.retire();
            // Its answer is that the log has stopped; what counts is that the flusher is past it.
            let _ = barrier(core);
        }
        self.meta(vec![MetaRecord::ReplicaRemoved(key)])?;
        replica_dir::remove(shared.fs.as_ref(), &self.replica_dir(&key))
    }

    /// Syncs everything, stops the threads and unlocks the directory. Later calls fail with
    /// [`Error::Closed`].
    ///
    /// # Cancel safety
    /// A dropped future does not stop the shutdown.
    pub async fn shutdown(&self) {
        let handle = Arc::clone(&self.handle);
        let (done, receiver) = oneshot::channel();
        let spawned = std::thread::Builder::new()
            .name("storage-shutdown".into())
            .spawn(move || {
                handle.stop();
                // The caller may have gone.
                let _ = done.send(());
            });
        match spawned {
            Ok(_) => {
                let _ = receiver.await;
            }
            Err(_) => self.handle.stop(),
        }
    }
}

impl Handle {
    fn stop(&self) {
        let mut running = self.running.lock();
        self.shared.queue.close();
        let Some(stopped) = running.take() else {
            return;
        };
        if stopped.flusher.join().is_err() {
            tracing::error!("the flusher ended with a panic");
        }
        self.shared.background.close();
        if stopped.background.join().is_err() {
            tracing::error!("the background thread ended with a panic");
        }
        drop(stopped.lock);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Dropped on the flusher itself (by a callback that held the last store), nothing may wait.
        let is_own_thread =
            self.running.get_mut().as_ref().is_some_and(|running| {
                running.flusher.thread().id() == std::thread::current().id()
            });
        if is_own_thread {
            self.shared.queue.close();
            self.shared.background.close();
        } else {
            self.stop();
        }
    }
}

fn check_config(config: &LogConfig) -> Result<(), Error> {
    let allowed = LogConfig::SEGMENT_BYTES_MIN..=LogConfig::SEGMENT_BYTES_MAX;
    if allowed.contains(&config.segment_bytes) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "segment_bytes is {}, allowed are {} to {}",
        config.segment_bytes,
        allowed.start(),
        allowed.end()
    )))
}

fn write_meta(shared: &Shared, records: Vec<MetaRecord>) -> Result<(), Error> {
    let (done, receiver) = mpsc::sync_channel(1);
    shared.queue.push(Op::Meta {
        records,
        done: Box::new(move |outcome| {
            // The receiver waits below.
            let _ = done.send(outcome);
        }),
    })?;
    receiver.recv().unwrap_or(Err(Error::Closed))
}

fn barrier(core: Arc<LogCore>) -> Result<(), Error> {
    let (done, receiver) = mpsc::sync_channel(1);
    let shared = Arc::clone(&core.shared);
    shared.queue.push(Op::Alone {
        core,
        act: Act::Barrier,
        done: Box::new(move |outcome| {
            // The receiver waits below.
            let _ = done.send(outcome);
        }),
    })?;
    receiver.recv().unwrap_or(Err(Error::Closed))
}
