//! What `produce` sends: the lines of standard input, read by a thread of their own (a blocked
//! read must not keep the command from ending), or one file.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread;

use bytes::Bytes;
use tokio::sync::mpsc;

use crate::exit::Failure;
use crate::lines::{self, Group, Lines};

/// Groups of lines read ahead: about a megabyte.
const GROUPS_AHEAD: usize = 4;

/// Reads the lines of standard input. The channel closes at the end of input; an error is the
/// last thing that comes.
///
/// # Errors
/// The thread can't be started.
pub fn stdin_lines(
    line_bytes_max: usize,
) -> Result<mpsc::Receiver<Result<Group, lines::Error>>, Failure> {
    let (groups, received) = mpsc::channel(GROUPS_AHEAD);
    thread::Builder::new()
        .name("stdin".to_owned())
        .spawn(move || {
            let mut lines = Lines::new(io::stdin().lock(), line_bytes_max);
            while let Some(item) = lines.next_group().transpose() {
                let failed = item.is_err();
                if groups.blocking_send(item).is_err() || failed {
                    return;
                }
            }
        })
        .map_err(|error| Failure::error(format!("can't start a thread: {error}")))?;
    Ok(received)
}

/// Reads a whole file, `-` for standard input, on a thread of its own: what is read may be a pipe on
/// which nobody writes.
///
/// # Errors
/// It can't be read, or has more than `bytes_max` bytes.
pub async fn whole_file(path: PathBuf, bytes_max: usize) -> Result<Bytes, Failure> {
    let reading = tokio::task::spawn_blocking(move || read_whole(&path, bytes_max));
    reading
        .await
        .map_err(|error| Failure::error(format!("reading failed: {error}")))?
}

fn read_whole(path: &Path, bytes_max: usize) -> Result<Bytes, Failure> {
    let shown = path.display();
    let cannot = |error: io::Error| Failure::error(format!("can't read {shown}: {error}"));
    let mut bytes = Vec::new();
    let limit = u64::try_from(bytes_max).map_or(u64::MAX, |max| max.saturating_add(1));
    if path.as_os_str() == "-" {
        io::stdin().lock().take(limit).read_to_end(&mut bytes)
    } else {
        let file = File::open(path).map_err(cannot)?;
        file.take(limit).read_to_end(&mut bytes)
    }
    .map_err(cannot)?;
    if bytes.len() > bytes_max {
        return Err(Failure::error(format!(
            "{shown} has more than {bytes_max} bytes, the most that a record may have"
        ))
        .hint("split it, or send a reference to it"));
    }
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn whole_file_keeps_every_byte() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"a\r\n\0\xffb\n").unwrap();
        assert_eq!(read_whole(file.path(), 7).unwrap(), &b"a\r\n\0\xffb\n"[..]);
    }

    #[test]
    fn whole_file_that_is_empty_is_an_empty_value() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(read_whole(file.path(), 7).unwrap(), &b""[..]);
    }

    #[test]
    fn whole_file_too_large_endless_missing_or_no_file_is_one_clear_error() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"12345678").unwrap();
        let dir = tempfile::tempdir().unwrap();
        for (path, says) in [
            (file.path(), "more than 7"),
            (Path::new("/dev/zero"), "more than 7"),
            (Path::new("/no/such"), "/no/such"),
            (dir.path(), "directory"),
        ] {
            let message = read_whole(path, 7).unwrap_err().message;
            assert!(message.contains(says), "{message}");
        }
    }
}
