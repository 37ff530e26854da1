//! Opening a log: what is on disk, what of it counts, and whether it may be believed.
//!
//! | found | then |
//! | --- | --- |
//! | a listed replica without directory or segments | quarantine (S6) |
//! | segments that a truncation or a purge had ended | removed: that was on its way |
//! | a sealed segment whose index matches it and its successor | believed |
//! | a sealed segment otherwise | read whole; anything broken is damage (S2), else the index is written |
//! | the active segment | read whole; broken frame: torn tail or damage (S2) |
//! | the end below a checkpoint, commit mark or purge mark | quarantine (S1) |
//! | an install begun | finished when its checkpoint is there, else forgotten (S1) |

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, IoSlice};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::checkpoint;
use super::codec::usize_of;
use super::error::{At as _, Error};
use super::header::{SEGMENT_HEADER, SegmentHeader};
use super::index::{SegmentEnd, SparseIndex, TermRuns};
use super::meta_record::{MetaRecord, ReplicaMeta};
use super::scan;
use super::segment::{Segment, index_path, read_index, segment_name};
use super::state::State;
use super::types::ReplicaKey;
use super::writer::{Writer, create_segment};
use crate::env::{File, Fs, read_exact_at, remove_if_there, write_atomically};

/// An opened log.
pub(super) struct Recovered {
    pub state: State,
    pub writer: Writer,
    pub active_len: u64,
    pub checkpoints: BTreeSet<u64>,
}

struct Found {
    path: PathBuf,
    header: SegmentHeader,
    crc: u32,
    file: Arc<dyn File>,
}

struct Listing {
    bases: Vec<u64>,
    checkpoints: BTreeSet<u64>,
}

fn quarantined(key: ReplicaKey, reason: impl Into<String>) -> Error {
    Error::Quarantined {
        replica: key,
        reason: reason.into(),
    }
}

/// Opens the log in `dir`. `note` writes meta records, synced.
pub(super) fn recover(
    fs: &dyn Fs,
    key: ReplicaKey,
    dir: &Path,
    meta: &ReplicaMeta,
    note: &dyn Fn(MetaRecord) -> Result<(), Error>,
) -> Result<Recovered, Error> {
    // S6: never created empty.
    if !fs.exists(dir).at("look for", dir)? {
        let reason = format!("its directory {} is missing", dir.display());
        return Err(quarantined(key, reason));
    }
    let mut listing = list(fs, dir)?;
    let mut meta = meta.clone();
    if let Some(reset) = meta.reset {
        if checkpoint_is_whole(fs, dir, &listing, reset.position.index)? {
            finish_reset(fs, key, dir, &meta, &mut listing)?;
            note(MetaRecord::ResetDone(key))?;
            meta.purged = Some(reset.position);
            meta.committed = Some(reset.position);
        } else {
            note(MetaRecord::ResetAbandoned(key))?;
        }
        meta.reset = None;
    }
    let mut found = open_segments(fs, key, dir, &listing)?;
    drop_ended(fs, dir, &meta, &mut found)?;
    let first_index = meta.purged.map_or(0, |purged| purged.index + 1);
    let Some(active) = found.pop_back() else {
        return Err(quarantined(key, "it has no segment"));
    };
    let first_base = found.front().unwrap_or(&active).header.base_index;
    if first_base > first_index {
        let reason = format!("its first segment begins at {first_base}, the log at {first_index}");
        return Err(quarantined(key, reason));
    }

    let mut segments = VecDeque::new();
    let mut terms = TermRuns::default();
    let heirs = found.iter().skip(1).chain(std::iter::once(&active));
    for (segment, heir) in found.iter().zip(heirs) {
        let (end, index) = sealed(fs, key, segment, &heir.header)?;
        terms.extend(&index.terms);
        segments.push_back(Segment::sealed(
            segment.path.clone(),
            segment.header,
            segment.crc,
            end,
        ));
    }
    let opened = open_active(key, &active, &meta)?;
    terms.extend(&opened.index.terms);
    check_floor(fs, key, dir, &meta, &mut listing, opened.end.index)?;

    let marks_max = meta.marks.iter().map(|mark| mark.round).max();
    let round = opened.round_max.max(marks_max.unwrap_or(0)) + 1;
    let end = opened.end;
    let segment = Segment::active(
        active.path.clone(),
        active.header,
        active.crc,
        Arc::clone(&active.file),
        opened.index,
        end,
    );
    segments.push_back(Arc::clone(&segment));
    let state = State {
        purged: meta.purged,
        next_index: end.index,
        next_offset: end.offset,
        last_time_ms: end.time_ms,
        terms,
        segments,
        planned: VecDeque::new(),
        tail_base: active.header.base_index,
        tail_pos: end.pos,
        roll_asked: false,
        cache: VecDeque::new(),
        cut_epoch: 0,
        committed: meta.committed,
        vote: meta.vote,
    };
    let active_len = active.file.len().at("measure", &active.path)?;
    Ok(Recovered {
        state,
        writer: Writer::new(segment, active.file, end, round),
        active_len,
        checkpoints: listing.checkpoints,
    })
}

fn list(fs: &dyn Fs, dir: &Path) -> Result<Listing, Error> {
    let mut bases = Vec::new();
    let mut checkpoints = BTreeSet::new();
    for entry in fs.read_dir(dir).at("list", dir)? {
        let numbered = entry
            .name
            .split_once('.')
            .and_then(|(digits, kind)| Some((digits.parse::<u64>().ok()?, kind)));
        match numbered {
            Some((base, "log")) => bases.push(base),
            Some((index, "ckpt")) => {
                checkpoints.insert(index);
            }
            Some((_, "idx")) => {}
            // A file that did not get its name before a stop: it was never part of the log.
            Some((_, "tmp" | "idx.tmp" | "ckpt.tmp")) => {
                let path = dir.join(&entry.name);
                fs.remove_file(&path).at("remove", &path)?;
            }
            _ => tracing::warn!(
                path = %dir.join(&entry.name).display(),
                "unknown file in a replica's directory, left alone"
            ),
        }
    }
    bases.sort_unstable();
    Ok(Listing { bases, checkpoints })
}

fn open_segments(
    fs: &dyn Fs,
    key: ReplicaKey,
    dir: &Path,
    listing: &Listing,
) -> Result<VecDeque<Found>, Error> {
    let mut found = VecDeque::new();
    for base in &listing.bases {
        let path = dir.join(segment_name(*base));
        let file = fs.open(&path).at("open", &path)?;
        let mut bytes = [0; SEGMENT_HEADER];
        // Headers are synced before a file gets its name: a broken one is damage.
        match read_exact_at(file.as_ref(), &mut bytes, 0) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
            read => read.at("read", &path)?,
        }
        let (header, crc) = SegmentHeader::decode(&bytes)
            .map_err(|reason| quarantined(key, format!("{}: {reason}", path.display())))?;
        if header.base_index != *base || header.replica != key.replica.0 {
            let reason = format!(
                "{} is segment {} of replica {}: a misplaced file",
                path.display(),
                header.base_index,
                header.replica
            );
            return Err(quarantined(key, reason));
        }
        found.push_back(Found {
            path,
            header,
            crc,
            file,
        });
    }
    Ok(found)
}

/// Removes segments whose end had been decided and recorded before the stop.
fn drop_ended(
    fs: &dyn Fs,
    dir: &Path,
    meta: &ReplicaMeta,
    found: &mut VecDeque<Found>,
) -> Result<(), Error> {
    let mut gone = Vec::new();
    // S3: a segment of a truncation's rounds that begins in what it cut. The first one stays: a log
    // always has a segment, and its frames are void one by one.
    while found.len() > 1
        && found
            .back()
            .is_some_and(|last| meta.is_void(last.header.base_index, last.header.round_floor))
    {
        gone.extend(found.pop_back());
    }
    // S1: the purge mark was synced, the files were next.
    let first_index = meta.purged.map_or(0, |purged| purged.index + 1);
    while found
        .get(1)
        .is_some_and(|second| second.header.base_index <= first_index)
    {
        gone.extend(found.pop_front());
    }
    for segment in &gone {
        for path in [&index_path(&segment.path), &segment.path] {
            remove_if_there(fs, path).at("remove", path)?;
        }
    }
    if !gone.is_empty() {
        fs.sync_dir(dir).at("sync", dir)?;
    }
    Ok(())
}

/// The end of a sealed segment: from its index, or by reading it.
fn sealed(
    fs: &dyn Fs,
    key: ReplicaKey,
    segment: &Found,
    heir: &SegmentHeader,
) -> Result<(SegmentEnd, SparseIndex), Error> {
    let fits = |end: &SegmentEnd| {
        end.index == heir.base_index
            && end.offset == heir.base_offset
            && end.link == heir.prev_link
            && end.term == heir.prev_term
    };
    let len = segment.file.len().at("measure", &segment.path)?;
    if let Some((end, index)) = read_index(fs, &segment.path, &segment.header, false)
        && fits(&end)
        && len >= u64::from(end.pos)
    {
        return Ok((end, index));
    }
    let scanned = scan::scan(
        segment.file.as_ref(),
        &segment.header,
        segment.crc,
        Some(heir.base_index),
        &|_, _| false,
    )
    .at("read", &segment.path)?;
    // S2: it was synced to its end before its successor existed, so whatever is broken is damage.
    if !fits(&scanned.end) {
        let reason = format!(
            "{} is damaged at position {}: index {} was to follow, up to {}",
            segment.path.display(),
            scanned.end.pos,
            scanned.end.index,
            heir.base_index
        );
        return Err(quarantined(key, reason));
    }
    let path = index_path(&segment.path);
    if let Err(error) = write_atomically(
        fs,
        &path,
        &scanned.index.encode(&segment.header, &scanned.end),
    ) {
        // It is rebuilt again next time.
        tracing::warn!(path = %path.display(), %error, "an index could not be written");
    }
    Ok((scanned.end, scanned.index))
}

/// Reads the active segment, cuts a torn tail, and makes sure that what counts is on disk.
fn open_active(key: ReplicaKey, active: &Found, meta: &ReplicaMeta) -> Result<scan::Scan, Error> {
    let is_void = |index, round| meta.is_void(index, round);
    let scanned = scan::scan(
        active.file.as_ref(),
        &active.header,
        active.crc,
        None,
        &is_void,
    )
    .at("read", &active.path)?;
    if let Some(evidence) = scanned.evidence {
        // S2, S7: what lies between was synced once. Never served, never cut.
        let reason = format!(
            "{} is damaged at position {}: index {} was to follow, and index {} of a later round \
             stands at {}",
            active.path.display(),
            scanned.end.pos,
            scanned.end.index,
            evidence.index,
            evidence.pos
        );
        return Err(quarantined(key, reason));
    }
    // S4: if the last run's last sync failed, its pages may be in the cache and not on disk, marked
    // clean. Earlier rounds were synced; the last one is written again before it is believed.
    let from = u64::from(scanned.last_round_start);
    rewrite(active.file.as_ref(), from, u64::from(scanned.end.pos)).at("sync", &active.path)?;
    Ok(scanned)
}

fn rewrite(file: &dyn File, mut from: u64, to: u64) -> io::Result<()> {
    let mut piece = vec![0; usize_of((to - from).min(256 << 10))];
    while from < to {
        let len = piece.len().min(usize_of(to - from));
        let piece = piece.get_mut(..len).unwrap_or_default();
        read_exact_at(file, piece, from)?;
        file.write_all_at(&mut [IoSlice::new(piece)], from)?;
        from += len as u64;
    }
    file.sync_data()
}

fn checkpoint_is_whole(
    fs: &dyn Fs,
    dir: &Path,
    listing: &Listing,
    index: u64,
) -> Result<bool, Error> {
    Ok(listing.checkpoints.contains(&index) && checkpoint::read(fs, dir, index)?.is_some())
}

/// S1: nothing that was promised lies beyond the end.
fn check_floor(
    fs: &dyn Fs,
    key: ReplicaKey,
    dir: &Path,
    meta: &ReplicaMeta,
    listing: &mut Listing,
    end_index: u64,
) -> Result<(), Error> {
    let marks = [
        ("a checkpoint", listing.checkpoints.last().copied()),
        ("the commit mark", meta.committed.map(|at| at.index)),
        ("the purge mark", meta.purged.map(|at| at.index)),
    ];
    for (what, index) in marks {
        if let Some(index) = index
            && index >= end_index
        {
            let reason = format!("the log ends before index {end_index}, {what} stands at {index}");
            return Err(quarantined(key, reason));
        }
    }
    let broken: Vec<u64> = {
        let mut broken = Vec::new();
        for index in &listing.checkpoints {
            if checkpoint::read(fs, dir, *index)?.is_none() {
                broken.push(*index);
            }
        }
        broken
    };
    for index in broken {
        tracing::error!(replica = %key, index, "a checkpoint is damaged and not used");
        listing.checkpoints.remove(&index);
    }
    if let Some(purged) = meta.purged
        && listing
            .checkpoints
            .last()
            .is_none_or(|last| *last < purged.index)
    {
        let reason = format!("no checkpoint at or after index {}", purged.index);
        return Err(quarantined(key, reason));
    }
    Ok(())
}

/// Finishes a snapshot install that a stop interrupted.
fn finish_reset(
    fs: &dyn Fs,
    key: ReplicaKey,
    dir: &Path,
    meta: &ReplicaMeta,
    listing: &mut Listing,
) -> Result<(), Error> {
    let Some(reset) = meta.reset else {
        return Ok(());
    };
    let mut round = meta.marks.iter().map(|mark| mark.round).max().unwrap_or(0);
    for base in listing.bases.drain(..).rev() {
        let path = dir.join(segment_name(base));
        let file = fs.open(&path).at("open", &path)?;
        let mut bytes = [0; SEGMENT_HEADER];
        if read_exact_at(file.as_ref(), &mut bytes, 0).is_ok()
            && let Ok((header, _)) = SegmentHeader::decode(&bytes)
        {
            round = round.max(header.round_floor);
        }
        for path in [&index_path(&path), &path] {
            remove_if_there(fs, path).at("remove", path)?;
        }
    }
    fs.sync_dir(dir).at("sync", dir)?;
    let header = SegmentHeader {
        replica: key.replica.0,
        base_index: reset.position.index + 1,
        base_offset: reset.base_offset,
        nonce: rand::random(),
        round_floor: round + 1,
        prev_term: reset.position.term,
        prev_time_ms: reset.time_ms,
        prev_link: 0,
    };
    create_segment(fs, dir, header)?;
    listing.bases.push(header.base_index);
    let newer = listing.checkpoints.split_off(&(reset.position.index + 1));
    for index in newer {
        let path = dir.join(checkpoint::name(index));
        remove_if_there(fs, &path).at("remove", &path)?;
    }
    Ok(())
}
