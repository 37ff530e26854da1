//! Standard output for streams of records: whole buffers, written by a thread of their own, so
//! that a reader who stalls never keeps the command from noticing a signal. One buffer is being
//! written while the next is filled; there are never more than two.
//!
//! A reader who goes away (`qute consume ... | head`) is noticed even while nothing is written.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc;
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::oneshot;

use crate::exit::{Exit, Failure};

/// Buffers are handed over at about this size.
pub const BUFFER_BYTES: usize = 256 * 1024;

/// Why standard output takes no more.
#[derive(Debug)]
pub enum Error {
    /// Whoever read it has left. No fault of anybody.
    Closed,
    /// It could not be written.
    Failed(io::Error),
}

impl Error {
    /// How the command ends over this: well if the reader left, else with an error.
    pub fn ending(self) -> Result<Exit, Failure> {
        match self {
            Self::Closed => Ok(Exit::Done),
            Self::Failed(error) => Err(Failure::error(format!(
                "can't write standard output: {error}"
            ))),
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Failed(error),
        }
    }
}

struct Job {
    bytes: Vec<u8>,
    done: oneshot::Sender<(Vec<u8>, io::Result<()>)>,
}

/// A place to write buffers to.
#[derive(Debug)]
pub struct Sink {
    jobs: mpsc::Sender<Job>,
    pending: Option<oneshot::Receiver<(Vec<u8>, io::Result<()>)>>,
    spare: Vec<u8>,
}

/// Tells when whoever reads standard output has left.
#[derive(Debug)]
pub struct ReaderLeft(Option<oneshot::Receiver<()>>);

impl Sink {
    /// Standard output.
    ///
    /// # Errors
    /// The descriptor can't be shared with a thread.
    pub fn stdout() -> Result<(Self, ReaderLeft), Error> {
        Ok(Self::over(io::stdout().as_fd().try_clone_to_owned()?)?)
    }

    /// Any descriptor.
    pub(crate) fn over(fd: OwnedFd) -> io::Result<(Self, ReaderLeft)> {
        let (jobs, received) = mpsc::channel();
        let (left, reader_left) = oneshot::channel();
        let watched = fd.try_clone()?;
        thread::Builder::new()
            .name("stdout".to_owned())
            .spawn(move || write_all_jobs(File::from(fd), &received))?;
        thread::Builder::new()
            .name("stdout-watch".to_owned())
            .spawn(move || {
                if wait_for_hang_up(&watched) {
                    let _ = left.send(());
                }
            })?;
        let sink = Self {
            jobs,
            pending: None,
            spare: Vec::with_capacity(BUFFER_BYTES + BUFFER_BYTES / 4),
        };
        Ok((sink, ReaderLeft(Some(reader_left))))
    }

    /// Hands `buffer` over to be written and leaves an empty one in its place; waits until the
    /// one before is out.
    ///
    /// # Errors
    /// Of the write before.
    ///
    /// # Cancel safety
    /// Cancelled, it has handed nothing over and `buffer` is as it was.
    pub async fn write(&mut self, buffer: &mut Vec<u8>) -> Result<(), Error> {
        self.flush().await?;
        if buffer.is_empty() {
            return Ok(());
        }
        let (done, pending) = oneshot::channel();
        let bytes = std::mem::replace(buffer, std::mem::take(&mut self.spare));
        self.pending = Some(pending);
        self.jobs
            .send(Job { bytes, done })
            .map_err(|_| Error::Failed(io::Error::other("the writing thread is gone")))
    }

    /// Waits until everything handed over is out.
    ///
    /// # Errors
    /// It could not be written.
    ///
    /// # Cancel safety
    /// Cancelled, it can be called again.
    pub async fn flush(&mut self) -> Result<(), Error> {
        let Some(pending) = &mut self.pending else {
            return Ok(());
        };
        let answer = pending.await;
        self.pending = None;
        let (mut spare, result) =
            answer.map_err(|_| Error::Failed(io::Error::other("the writing thread is gone")))?;
        spare.clear();
        self.spare = spare;
        Ok(result?)
    }

    /// Whether a buffer is still being written.
    #[must_use]
    pub fn is_writing(&self) -> bool {
        self.pending.is_some()
    }
}

impl ReaderLeft {
    /// Resolves when the reader has left; never if it stays.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait(&mut self) {
        if let Some(left) = &mut self.0 {
            let seen = left.await;
            self.0 = None;
            if seen.is_ok() {
                return;
            }
        }
        // Told before, or the watcher ended without seeing anybody leave.
        std::future::pending().await
    }
}

fn write_all_jobs(mut out: File, jobs: &mpsc::Receiver<Job>) {
    while let Ok(Job { bytes, done }) = jobs.recv() {
        let result = write_all(&mut out, &bytes);
        let _ = done.send((bytes, result));
    }
}

fn write_all(out: &mut File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Somebody who shares the descriptor made it non-blocking.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(out, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Blocks until the other end is gone. Files never report that.
fn wait_for_hang_up(fd: &OwnedFd) -> bool {
    loop {
        // Asked for nothing, poll reports errors and hang-ups only.
        let mut fds = [PollFd::new(fd, PollFlags::empty())];
        match poll(&mut fds, None) {
            Ok(_) => {
                return fds
                    .iter()
                    .any(|fd| fd.revents().intersects(PollFlags::ERR | PollFlags::HUP));
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    fn pipe() -> (std::io::PipeReader, Sink, ReaderLeft) {
        let (reader, writer) = std::io::pipe().unwrap();
        let (sink, reader_left) = Sink::over(OwnedFd::from(writer)).unwrap();
        (reader, sink, reader_left)
    }

    #[tokio::test]
    async fn sink_writes_buffers_in_order() {
        let (mut reader, mut sink, _) = pipe();
        let reading = thread::spawn(move || {
            let mut all = vec![0; 1_000_000];
            reader.read_exact(&mut all).unwrap();
            all
        });
        for i in 0..100u8 {
            let mut buffer = vec![i; 10_000];
            sink.write(&mut buffer).await.unwrap();
            assert!(buffer.is_empty());
        }
        sink.flush().await.unwrap();
        assert!(!sink.is_writing());
        let all = reading.join().unwrap();
        assert!((0..100).all(|i| {
            all[i * 10_000..][..10_000]
                .iter()
                .all(|&b| usize::from(b) == i)
        }));
    }

    #[tokio::test]
    async fn sink_with_reader_gone_says_closed() {
        let (reader, mut sink, _) = pipe();
        drop(reader);
        let mut buffer = b"x".to_vec();
        sink.write(&mut buffer).await.unwrap();
        assert!(matches!(sink.flush().await, Err(Error::Closed)));
    }

    #[tokio::test]
    async fn sink_notices_reader_leaving_while_idle() {
        let (reader, _sink, mut reader_left) = pipe();
        let leaving = thread::spawn(move || drop(reader));
        reader_left.wait().await;
        leaving.join().unwrap();
    }

    #[tokio::test]
    async fn sink_cancelled_while_reader_stalls_keeps_the_buffer() {
        let (_reader, mut sink, _) = pipe();
        // More than a pipe holds: the write cannot end.
        sink.write(&mut vec![0; 4 << 20]).await.unwrap();
        let mut next = b"kept".to_vec();
        tokio::select! {
            biased;
            _ = sink.write(&mut next) => unreachable!("nobody reads"),
            () = std::future::ready(()) => {}
        }
        assert_eq!(next, b"kept".to_vec());
        assert!(sink.is_writing());
    }
}
