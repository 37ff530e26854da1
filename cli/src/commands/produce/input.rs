//! What `produce` sends: the lines of standard input, read by a thread of their own (a blocked
//! read must not keep the command from ending), or one file.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
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

/// Reads a whole file, `-` for standard input.
///
/// # Errors
/// It can't be read, or has more than `bytes_max` bytes.
pub fn whole_file(path: &Path, bytes_max: usize) -> Result<Bytes, Failure> {
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
        assert_eq!(whole_file(file.path(), 7).unwrap(), &b"a\r\n\0\xffb\n"[..]);
    }

    #[test]
    fn whole_file_too_large_or_missing_is_one_clear_error() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"12345678").unwrap();
        assert!(
            whole_file(file.path(), 7)
                .unwrap_err()
                .message
                .contains("more than 7")
        );
        assert!(
            whole_file(Path::new("/no/such"), 7)
                .unwrap_err()
                .message
                .contains("/no/such")
        );
    }
}
