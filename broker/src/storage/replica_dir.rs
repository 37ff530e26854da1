//! Directories of replicas: made, removed, surveyed (S22).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::error::{At as _, Error};
use super::header::SEGMENT_HEADER;
use super::meta_record::MetaState;
use super::types::ReplicaKey;
use crate::env::Fs;

/// `<topics>/<topic id>/<partition>-<replica id>`
pub(super) fn path(topics: &Path, key: &ReplicaKey) -> PathBuf {
    topics
        .join(key.partition.topic.to_string())
        .join(format!("{}-{}", key.partition.partition, key.replica))
}

/// Makes a directory that may be there.
pub(super) fn make_dir(fs: &dyn Fs, path: &Path) -> Result<(), Error> {
    match fs.create_dir(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        made => made.at("create", path),
    }
}

/// What a creation that was interrupted before it was listed has left; never data.
pub(super) fn clear_unlisted(fs: &dyn Fs, dir: &Path, key: ReplicaKey) -> Result<(), Error> {
    let entries = fs.read_dir(dir).at("list", dir)?;
    for entry in &entries {
        let path = dir.join(&entry.name);
        let len = if entry.is_dir {
            u64::MAX
        } else {
            fs.open(&path)
                .and_then(|file| file.len())
                .at("measure", &path)?
        };
        if len > SEGMENT_HEADER as u64 {
            // S22
            return Err(Error::Conflict {
                replica: key,
                reason: "its directory holds data that the meta log does not list; it is kept",
            });
        }
    }
    for entry in &entries {
        let path = dir.join(&entry.name);
        fs.remove_file(&path).at("remove", &path)?;
    }
    Ok(())
}

/// Removes a replica's files by their kinds, then its directory when nothing else is in it.
pub(super) fn remove(fs: &dyn Fs, dir: &Path) -> Result<(), Error> {
    if !fs.exists(dir).at("look for", dir)? {
        return Ok(());
    }
    let mut kept = 0;
    for entry in fs.read_dir(dir).at("list", dir)? {
        let path = dir.join(&entry.name);
        let is_ours = entry.name.split_once('.').is_some_and(|(digits, kind)| {
            digits.parse::<u64>().is_ok()
                && ["log", "idx", "ckpt", "tmp", "idx.tmp", "ckpt.tmp"].contains(&kind)
        });
        if is_ours && !entry.is_dir {
            fs.remove_file(&path).at("remove", &path)?;
        } else {
            kept += 1;
            tracing::warn!(path = %path.display(), "unknown file in a removed replica's directory, left alone");
        }
    }
    fs.sync_dir(dir).at("sync", dir)?;
    let Some(topic) = dir.parent() else {
        return Ok(());
    };
    if kept == 0 {
        fs.remove_dir(dir).at("remove", dir)?;
        fs.sync_dir(topic).at("sync", topic)?;
    }
    // The topic's directory goes with its last replica; another replica keeps it.
    if let Some(topics) = topic.parent()
        && fs.read_dir(topic).at("list", topic)?.is_empty()
        && fs.remove_dir(topic).is_ok()
    {
        fs.sync_dir(topics).at("sync", topics)?;
    }
    Ok(())
}

/// Finishes removals that a stop interrupted; finds directories that nobody lists (S22).
pub(super) fn survey(fs: &dyn Fs, topics: &Path, meta: &MetaState) -> Result<Vec<PathBuf>, Error> {
    let path_of = |key: &ReplicaKey| path(topics, key);
    let listed: BTreeSet<PathBuf> = meta.replicas.keys().map(path_of).collect();
    let removed: BTreeSet<PathBuf> = meta.removed.iter().map(path_of).collect();
    let mut unknown = Vec::new();
    for topic in fs.read_dir(topics).at("list", topics)? {
        let topic_dir = topics.join(&topic.name);
        if !topic.is_dir {
            unknown.push(topic_dir);
            continue;
        }
        for replica in fs.read_dir(&topic_dir).at("list", &topic_dir)? {
            let dir = topic_dir.join(&replica.name);
            if removed.contains(&dir) {
                remove(fs, &dir)?;
            } else if !listed.contains(&dir) {
                unknown.push(dir);
            }
        }
    }
    for path in &unknown {
        tracing::warn!(path = %path.display(), "no replica of this broker: kept, not used");
    }
    Ok(unknown)
}
