//! The meta log: one append-only file for all replicas of a broker (S6).
//!
//! It is the authority on which replicas exist, on votes, and on marks. Files are
//! `meta/<number, 20 digits>.log`; the highest number counts. Each opening and each compaction
//! writes the state into a new file: written beside, synced, renamed, directory synced.
//!
//! ```text
//! file:   0 magic "QUTEMETA", version u32, crc u32 (over the other 36 bytes)
//!        16 broker_id u64
//!        24 nonce u64
//!        32 state_end u64    everything before this position was synced before the file got its name
//! record: 0 length u32       bytes of the body
//!         4 crc u32          CRC32C over bytes 8..32, the body and the file's nonce
//!         8 prev_link u32    crc of the record before; of the first: CRC32C of the nonce
//!        12 round_start u32  file position where its round began
//!        16 round u64        rounds are separated by syncs (S2)
//!        24 zeros u64
//!        32 body: kind u8, fields; then zeros up to a multiple of 8
//! ```
//!
//! The flusher is the only writer. A broken record with a whole one of a later round behind it is
//! damage, and then nothing of the data directory is served (S6); otherwise it is a torn tail.

use std::io::IoSlice;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::codec::{Put, Reader, align_up, usize_of};
use super::error::{At as _, Error};
use super::meta_record::{MetaRecord, MetaState};
use crate::env::{File, Fs, read_all, remove_if_there};

const MAGIC: [u8; 8] = *b"QUTEMETA";
const VERSION: u32 = 1;
const FILE_HEADER: usize = 40;
const RECORD_HEADER: usize = 32;
const ALIGN: u64 = 8;
/// A file is compacted when it has outgrown this and four times its state.
const COMPACT_BYTES_MIN: u64 = 1 << 20;
const FILE_BYTES_MAX: usize = 1 << 30;

/// The open file.
pub(super) struct MetaFile {
    fs: Arc<dyn Fs>,
    dir: PathBuf,
    broker_id: u64,
    path: PathBuf,
    number: u64,
    nonce: u64,
    file: Arc<dyn File>,
    pos: u64,
    state_bytes: u64,
    link: u32,
    round: u64,
    round_start: u64,
    round_open: bool,
}

fn record_crc(nonce: u64, fields: &[u8], body: &[u8]) -> u32 {
    let crc = crc32c::crc32c(&nonce.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c_append(crc, fields), body)
}

fn file_header(broker_id: u64, nonce: u64, state_end: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FILE_HEADER);
    bytes.extend_from_slice(&MAGIC);
    bytes.put_u32_le(VERSION);
    let mut rest = Vec::new();
    rest.put_u64_le(broker_id);
    rest.put_u64_le(nonce);
    rest.put_u64_le(state_end);
    bytes.put_u32_le(crc32c::crc32c_append(crc32c::crc32c(&bytes), &rest));
    bytes.extend_from_slice(&rest);
    bytes
}

fn name(number: u64) -> String {
    format!("{number:020}.log")
}

fn damaged(path: &Path, reason: impl Into<String>) -> Error {
    Error::DataDirDamaged {
        path: path.to_path_buf(),
        reason: format!("the meta log {}", reason.into()),
    }
}

impl MetaFile {
    /// Writes `state` as file `number` and makes it the one that counts.
    pub(super) fn create(
        fs: Arc<dyn Fs>,
        dir: &Path,
        broker_id: u64,
        number: u64,
        state: &MetaState,
    ) -> Result<Self, Error> {
        let nonce: u64 = rand::random();
        let path = dir.join(name(number));
        let beside = path.with_extension("tmp");
        remove_if_there(fs.as_ref(), &beside).at("remove", &beside)?;
        let file = fs.create_new(&beside).at("create", &beside)?;
        let mut out = Self {
            fs,
            dir: dir.to_path_buf(),
            broker_id,
            path: path.clone(),
            number,
            nonce,
            file,
            pos: FILE_HEADER as u64,
            state_bytes: 0,
            link: crc32c::crc32c(&nonce.to_le_bytes()),
            round: 1,
            round_start: FILE_HEADER as u64,
            round_open: true,
        };
        out.write(&state.records())?;
        let header = file_header(broker_id, nonce, out.pos);
        out.file
            .write_all_at(&mut [IoSlice::new(&header)], 0)
            .at("write", &beside)?;
        out.sync()?;
        out.fs.rename(&beside, &path).at("rename", &beside)?;
        out.fs.sync_dir(dir).at("sync", dir)?;
        out.state_bytes = out.pos;
        Ok(out)
    }

    /// Appends without a sync.
    pub(super) fn write(&mut self, records: &[MetaRecord]) -> Result<(), Error> {
        if records.is_empty() {
            return Ok(());
        }
        if !self.round_open {
            self.round_open = true;
            self.round_start = self.pos;
        }
        let mut out = Vec::new();
        let mut link = self.link;
        for record in records {
            let mut body = Vec::new();
            record.encode_into(&mut body);
            let mut fields = Vec::with_capacity(RECORD_HEADER - 8);
            fields.put_u32_le(link);
            fields.put_u32_le(u32::try_from(self.round_start).unwrap_or(u32::MAX));
            fields.put_u64_le(self.round);
            fields.put_u64_le(0);
            link = record_crc(self.nonce, &fields, &body);
            out.put_u32_le(u32::try_from(body.len()).unwrap_or(u32::MAX));
            out.put_u32_le(link);
            out.extend_from_slice(&fields);
            out.extend_from_slice(&body);
            out.resize(usize_of(align_up(out.len() as u64, ALIGN)), 0);
        }
        self.file
            .write_all_at(&mut [IoSlice::new(&out)], self.pos)
            .at("write", &self.path)?;
        self.pos += out.len() as u64;
        self.link = link;
        Ok(())
    }

    /// Makes everything appended durable.
    pub(super) fn sync(&mut self) -> Result<(), Error> {
        if self.round_open {
            self.file.sync_data().at("sync", &self.path)?;
            self.round_open = false;
            self.round += 1;
        }
        Ok(())
    }

    pub(super) fn wants_compaction(&self) -> bool {
        self.pos > COMPACT_BYTES_MIN && self.pos > 4 * self.state_bytes
    }

    /// Starts the next file with `state`. The old one is removed.
    pub(super) fn compact(&mut self, state: &MetaState) -> Result<(), Error> {
        let next = Self::create(
            Arc::clone(&self.fs),
            &self.dir,
            self.broker_id,
            self.number + 1,
            state,
        )?;
        let old = std::mem::replace(self, next);
        self.fs.remove_file(&old.path).at("remove", &old.path)
    }
}

/// What was found of earlier runs.
pub(super) struct Recovered {
    pub state: MetaState,
    /// The file that counts; `None` when there is none yet.
    pub number: Option<u64>,
    /// Files to remove once a newer one is in place.
    pub stale: Vec<PathBuf>,
}

/// Reads the meta log.
pub(super) fn recover(fs: &dyn Fs, dir: &Path, broker_id: u64) -> Result<Recovered, Error> {
    let mut numbers = Vec::new();
    let mut stale = Vec::new();
    for entry in fs.read_dir(dir).at("list", dir)? {
        match entry.name.split_once('.') {
            Some((digits, "log")) => numbers.extend(digits.parse::<u64>().ok()),
            Some((digits, "tmp")) if digits.parse::<u64>().is_ok() => {
                stale.push(dir.join(&entry.name));
            }
            _ => tracing::warn!(
                path = %dir.join(&entry.name).display(),
                "unknown file in the meta directory, left alone"
            ),
        }
    }
    numbers.sort_unstable();
    let Some(number) = numbers.pop() else {
        return Ok(Recovered {
            state: MetaState::default(),
            number: None,
            stale,
        });
    };
    // The newest file was complete and synced before it got its name.
    stale.extend(numbers.iter().map(|old| dir.join(name(*old))));
    let path = dir.join(name(number));
    stale.push(path.clone());
    let bytes = read_all(fs, &path, FILE_BYTES_MAX).at("read", &path)?;
    let state = replay(&bytes, broker_id).map_err(|reason| damaged(&path, reason))?;
    Ok(Recovered {
        state,
        number: Some(number),
        stale,
    })
}

struct RecordHeader {
    crc: u32,
    prev_link: u32,
    round_start: u32,
    round: u64,
    end: usize,
}

/// The record at `pos` and its body, when whole.
fn record_at(bytes: &[u8], pos: usize, nonce: u64) -> Option<(RecordHeader, &[u8])> {
    let mut from = Reader::new(bytes.get(pos..)?);
    let (length, crc) = (from.u32()?, from.u32()?);
    let fields = from.bytes(RECORD_HEADER - 8)?;
    let length = usize_of(u64::from(length));
    let body = from.bytes(length)?;
    if length == 0 || record_crc(nonce, fields, body) != crc {
        return None;
    }
    let mut fields = Reader::new(fields);
    let header = RecordHeader {
        crc,
        prev_link: fields.u32()?,
        round_start: fields.u32()?,
        round: fields.u64()?,
        end: usize_of(align_up((pos + RECORD_HEADER + length) as u64, ALIGN)),
    };
    Some((header, body))
}

fn replay(bytes: &[u8], broker_id: u64) -> Result<MetaState, String> {
    let mut from = Reader::new(bytes);
    let header = (|| {
        let (magic, version, crc) = (from.array::<8>()?, from.u32()?, from.u32()?);
        Some((magic, version, crc, from.u64()?, from.u64()?, from.u64()?))
    })();
    let Some((magic, version, crc, found_broker, nonce, state_end)) = header else {
        return Err("is cut short".into());
    };
    let expected = bytes
        .get(..12)
        .zip(bytes.get(16..FILE_HEADER))
        .map(|(front, rest)| crc32c::crc32c_append(crc32c::crc32c(front), rest));
    if magic != MAGIC || Some(crc) != expected {
        return Err("has a broken header".into());
    }
    if version != VERSION {
        return Err(format!("has format version {version}, {VERSION} is known"));
    }
    if found_broker != broker_id {
        return Err(format!(
            "belongs to broker {found_broker:016x}, IDENTITY says {broker_id:016x}: \
             files of two data directories were mixed"
        ));
    }
    let mut state = MetaState::default();
    let link = crc32c::crc32c(&nonce.to_le_bytes());
    let (mut pos, mut link, mut round) = (FILE_HEADER, link, 0);
    while let Some((header, body)) = record_at(bytes, pos, nonce) {
        if header.prev_link != link || header.round < round {
            break;
        }
        let record = MetaRecord::decode(body)
            .ok_or_else(|| format!("has an unknown record at position {pos}"))?;
        state.apply(&record);
        (pos, link, round) = (header.end, header.crc, header.round);
    }
    if (pos as u64) < state_end {
        return Err(format!("is broken at position {pos}"));
    }
    // S2, S6: a whole record of a later round proves that what is broken here had been synced.
    let broken = pos;
    let mut probe = pos;
    while probe + RECORD_HEADER <= bytes.len() {
        if let Some((header, _)) = record_at(bytes, probe, nonce)
            && header.round > round
            && usize_of(u64::from(header.round_start)) > broken
        {
            return Err(format!(
                "is broken at position {broken} (a later record stands at {probe})"
            ));
        }
        probe += usize_of(ALIGN);
    }
    Ok(state)
}
