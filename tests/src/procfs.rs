//! What the kernel says about a process and its files.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

/// Resident memory, in bytes.
///
/// # Errors
/// When the process is gone.
pub fn resident_bytes(pid: u32) -> Result<u64> {
    Ok(field(&format!("/proc/{pid}/status"), "VmRSS:")? * 1024)
}

/// CPU time used so far, user and system.
///
/// # Errors
/// When the process is gone.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    // The name in parentheses may hold blanks; utime and stime are fields 14 and 15.
    let (_, after) = text.rsplit_once(')').context("stat without a name")?;
    let ticks: u64 = after
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|field| field.parse::<u64>().ok())
        .sum();
    // USER_HZ, which Linux never changes.
    Ok(Duration::from_millis(ticks * 10))
}

fn field(path: &str, name: &str) -> Result<u64> {
    let text = std::fs::read_to_string(path).with_context(|| path.to_owned())?;
    text.lines()
        .find_map(|line| line.strip_prefix(name))
        .and_then(|rest| rest.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .with_context(|| format!("no {name} in {path}"))
}

/// Size of all files below a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The sum of their lengths.
    pub length: u64,
    /// The sum of their blocks on the device.
    pub allocated: u64,
}

/// Adds up the files below `dir`. A file that vanishes meanwhile is left out.
///
/// # Errors
/// When the directory can't be read.
pub fn usage(dir: &Path) -> Result<Usage> {
    let mut sum = Usage::default();
    let mut open = vec![dir.to_path_buf()];
    while let Some(dir) = open.pop() {
        let entries = std::fs::read_dir(&dir).with_context(|| dir.display().to_string())?;
        for entry in entries.flatten() {
            let Ok(meta) = entry.metadata() else { continue };
            if meta.is_dir() {
                open.push(entry.path());
            } else {
                sum.length += meta.len();
                sum.allocated += meta.blocks() * 512;
            }
        }
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_process_has_memory_and_time() {
        let pid = std::process::id();
        assert!(resident_bytes(pid).unwrap() > 0);
        assert!(cpu_time(pid).is_ok());
    }

    #[test]
    fn usage_counts_nested_files() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("a")).unwrap();
        std::fs::write(dir.path().join("a/b"), [0_u8; 5000]).unwrap();
        std::fs::write(dir.path().join("c"), [0_u8; 10]).unwrap();
        assert_eq!(usage(dir.path()).unwrap().length, 5010);
    }
}
