//! One segment file: its header, its end, its index.
//!
//! A segment is *active* (the flusher appends to it; its file stays open and its index is in memory)
//! or *sealed* (immutable; its file and index are opened on demand and closed when others need the
//! slots). Truncation may make a sealed segment active again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::error::{At as _, Error};
use super::files::{FileCache, OpenSegment};
use super::frame::FrameHeader;
use super::header::SegmentHeader;
use super::index::{INDEX_HEADER, IndexHeader, SegmentEnd, SparseIndex, TermRuns};
use super::scan;
use crate::env::{File, Fs, read_exact_at, write_atomically};

static SEGMENT_ID: AtomicU64 = AtomicU64::new(1);

/// See the module's documentation.
pub(super) struct Segment {
    /// Unique in this process.
    pub id: u64,
    pub header: SegmentHeader,
    pub header_crc: u32,
    pub path: PathBuf,
    live: Mutex<Live>,
    /// Held while the segment is sealed to disk or made active again.
    sealing: Mutex<()>,
}

enum Live {
    Active {
        file: Arc<dyn File>,
        index: SparseIndex,
        end: SegmentEnd,
    },
    /// No longer written; its index is still in memory until it is persisted.
    Closing {
        file: Arc<dyn File>,
        index: Arc<SparseIndex>,
        end: SegmentEnd,
    },
    Sealed {
        end: SegmentEnd,
    },
}

/// What a reader needs.
pub(super) struct Readable {
    pub file: Arc<dyn File>,
    pub end: SegmentEnd,
    /// Where to begin.
    pub pos: u32,
}

/// What a reader looks for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Seek {
    Index(u64),
    Offset(u64),
    TimeMs(u64),
}

impl SparseIndex {
    fn seek(&self, to: Seek) -> u32 {
        match to {
            Seek::Index(index) => self.floor_index(index),
            Seek::Offset(offset) => self.floor_offset(offset),
            Seek::TimeMs(time_ms) => self.floor_time(time_ms),
        }
    }
}

impl Segment {
    fn new(path: PathBuf, header: SegmentHeader, header_crc: u32, live: Live) -> Arc<Self> {
        Arc::new(Self {
            id: SEGMENT_ID.fetch_add(1, Ordering::Relaxed),
            header,
            header_crc,
            path,
            live: Mutex::new(live),
            sealing: Mutex::new(()),
        })
    }

    pub(super) fn active(
        path: PathBuf,
        header: SegmentHeader,
        header_crc: u32,
        file: Arc<dyn File>,
        index: SparseIndex,
        end: SegmentEnd,
    ) -> Arc<Self> {
        Self::new(path, header, header_crc, Live::Active { file, index, end })
    }

    pub(super) fn sealed(
        path: PathBuf,
        header: SegmentHeader,
        header_crc: u32,
        end: SegmentEnd,
    ) -> Arc<Self> {
        Self::new(path, header, header_crc, Live::Sealed { end })
    }

    pub(super) fn base_index(&self) -> u64 {
        self.header.base_index
    }

    pub(super) fn end(&self) -> SegmentEnd {
        match &*self.live.lock() {
            Live::Active { end, .. } | Live::Closing { end, .. } | Live::Sealed { end } => *end,
        }
    }

    /// Notes frames just written (flusher only).
    pub(super) fn note(&self, frames: &[FrameHeader]) {
        if let Live::Active { index, end, .. } = &mut *self.live.lock() {
            for frame in frames {
                index.note(frame, end.pos);
                *end = end.after(frame);
            }
        }
    }

    /// Ends the active time (flusher only).
    pub(super) fn close(&self) {
        let mut live = self.live.lock();
        if let Live::Active { file, index, end } = &mut *live {
            *live = Live::Closing {
                file: Arc::clone(file),
                index: Arc::new(std::mem::take(index)),
                end: *end,
            };
        }
    }

    /// Makes it active again, cut to `end` (flusher only, after a truncation).
    pub(super) fn reopen(
        &self,
        fs: &dyn Fs,
        files: &FileCache,
        end: SegmentEnd,
    ) -> Result<Arc<dyn File>, Error> {
        let _sealing = self.sealing.lock();
        let in_memory = match &*self.live.lock() {
            Live::Active { file, index, .. } => Ok((Arc::clone(file), index.clone())),
            Live::Closing { file, index, .. } => Ok((Arc::clone(file), index.as_ref().clone())),
            Live::Sealed { end } => Err(*end),
        };
        let (file, mut index) = match in_memory {
            Ok(in_memory) => in_memory,
            Err(sealed_end) => {
                let file = fs.open(&self.path).at("open", &self.path)?;
                let index = self.load_index(fs, file.as_ref(), &sealed_end)?;
                (file, index)
            }
        };
        index.cut(end.index);
        *self.live.lock() = Live::Active {
            file: Arc::clone(&file),
            index,
            end,
        };
        files.forget(self.id);
        Ok(file)
    }

    /// Persists a closed segment: cut to its end, index written (S5). Does nothing when a
    /// truncation made it active again, and says so.
    pub(super) fn seal(&self, fs: &dyn Fs) -> Result<bool, Error> {
        let _sealing = self.sealing.lock();
        let (file, index, end) = match &*self.live.lock() {
            Live::Closing { file, index, end } => (Arc::clone(file), Arc::clone(index), *end),
            Live::Active { .. } | Live::Sealed { .. } => return Ok(false),
        };
        file.set_len(u64::from(end.pos)).at("cut", &self.path)?;
        file.sync_data().at("sync", &self.path)?;
        let path = index_path(&self.path);
        write_atomically(fs, &path, &index.encode(&self.header, &end)).at("write", &path)?;
        *self.live.lock() = Live::Sealed { end };
        Ok(true)
    }

    /// Its files are about to be removed: nothing is persisted any more.
    pub(super) fn retire(&self) {
        let _sealing = self.sealing.lock();
        let mut live = self.live.lock();
        if let Live::Active { end, .. } | Live::Closing { end, .. } = &*live {
            *live = Live::Sealed { end: *end };
        }
    }

    /// Opens it for reading, from the best place to begin.
    pub(super) fn seek(&self, fs: &dyn Fs, files: &FileCache, to: Seek) -> Result<Readable, Error> {
        let end = match &*self.live.lock() {
            Live::Active { file, index, end } => {
                return Ok(Readable {
                    file: Arc::clone(file),
                    end: *end,
                    pos: index.seek(to),
                });
            }
            Live::Closing { file, index, end } => {
                return Ok(Readable {
                    file: Arc::clone(file),
                    end: *end,
                    pos: index.seek(to),
                });
            }
            Live::Sealed { end } => *end,
        };
        let open = match files.get(self.id) {
            Some(open) => open,
            None => {
                let file = fs.open(&self.path).at("open", &self.path)?;
                files.put(
                    self.id,
                    Arc::new(OpenSegment {
                        file,
                        index: std::sync::OnceLock::new(),
                    }),
                )
            }
        };
        let index = match open.index.get() {
            Some(index) => Arc::clone(index),
            None => {
                let index = Arc::new(self.load_index(fs, open.file.as_ref(), &end)?);
                Arc::clone(open.index.get_or_init(|| index))
            }
        };
        Ok(Readable {
            file: Arc::clone(&open.file),
            end,
            pos: index.seek(to),
        })
    }

    /// The index from its file, or rebuilt from the segment.
    fn load_index(
        &self,
        fs: &dyn Fs,
        file: &dyn File,
        end: &SegmentEnd,
    ) -> Result<SparseIndex, Error> {
        if let Some((_, index)) = read_index(fs, &self.path, &self.header, true) {
            return Ok(index);
        }
        let found = scan::scan(
            file,
            &self.header,
            self.header_crc,
            Some(end.index),
            &|_, _| false,
        )
        .at("read", &self.path)?;
        Ok(found.index)
    }
}

/// `<base>.log` -> `<base>.idx`
pub(super) fn index_path(segment: &Path) -> PathBuf {
    segment.with_extension("idx")
}

/// `<base index, 20 digits>.log`
pub(super) fn segment_name(base_index: u64) -> String {
    format!("{base_index:020}.log")
}

/// The end of a sealed segment as its index file tells, with its terms (and entries when
/// `entries`); `None` when the file is absent or is not whole.
pub(super) fn read_index(
    fs: &dyn Fs,
    segment: &Path,
    header: &SegmentHeader,
    entries: bool,
) -> Option<(SegmentEnd, SparseIndex)> {
    let file = fs.open(&index_path(segment)).ok()?;
    let len = super::codec::usize_of(file.len().ok()?);
    let mut front = vec![0; INDEX_HEADER];
    read_exact_at(file.as_ref(), &mut front, 0).ok()?;
    let described = IndexHeader::decode(&front)?;
    let (terms_len, entries_len) = (described.terms_len(), described.entries_len());
    let whole = INDEX_HEADER
        .checked_add(terms_len)
        .and_then(|sum| sum.checked_add(entries_len))?;
    if described.nonce != header.nonce || described.base_index != header.base_index || whole != len
    {
        return None;
    }
    let mut terms = vec![0; terms_len];
    read_exact_at(file.as_ref(), &mut terms, INDEX_HEADER as u64).ok()?;
    let terms: TermRuns = described.decode_terms(&terms)?;
    let entries = if entries {
        let mut bytes = vec![0; entries_len];
        read_exact_at(file.as_ref(), &mut bytes, (INDEX_HEADER + terms_len) as u64).ok()?;
        described.decode_entries(&bytes)?
    } else {
        Vec::new()
    };
    Some((described.end, SparseIndex { entries, terms }))
}
