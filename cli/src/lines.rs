//! Lines from a byte stream, as `produce` reads them.
//!
//! A line is what stands before a `\n`, byte for byte: no text is assumed, a `\r` stays, an empty
//! line counts, and a last line without a newline counts if it has a byte. Lines are slices of
//! the chunk they were read in: nothing is copied but the piece of a line that straddles two
//! chunks. Memory is bounded by the longest line allowed plus one chunk.

use std::io::{self, Read};

use bytes::{Bytes, BytesMut};

/// How much is read at once.
const CHUNK_BYTES: usize = 256 * 1024;

/// Consecutive lines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Number of the first line, from 1.
    pub first_number: u64,
    /// The lines, without their newlines.
    pub lines: Vec<Bytes>,
}

/// Why reading stopped.
#[derive(Debug)]
pub enum Error {
    /// The input could not be read.
    Read {
        /// The line it happened in.
        number: u64,
        /// What the system said.
        source: io::Error,
    },
    /// A line is longer than any record may be.
    TooLong {
        /// The line.
        number: u64,
        /// The limit.
        bytes_max: usize,
    },
}

/// Splits a byte stream into lines.
#[derive(Debug)]
pub struct Lines<R> {
    source: R,
    bytes_max: usize,
    buffer: BytesMut,
    /// Bytes of `buffer` known to hold no newline.
    scanned: usize,
    /// Number of the line that starts at the front of `buffer`.
    number: u64,
    ended: bool,
}

impl<R: Read> Lines<R> {
    /// Reads from `source` lines of `bytes_max` bytes at most.
    pub fn new(source: R, bytes_max: usize) -> Self {
        Self {
            source,
            bytes_max,
            buffer: BytesMut::new(),
            scanned: 0,
            number: 1,
            ended: false,
        }
    }

    /// All lines completed by the next bytes of the stream; `None` at its end. Blocks.
    ///
    /// # Errors
    /// The stream fails or a line is too long. The lines before it were returned by earlier
    /// calls. Nothing can be read afterwards.
    pub fn next_group(&mut self) -> Result<Option<Group>, Error> {
        loop {
            let group = self.split_complete();
            if !group.lines.is_empty() {
                return Ok(Some(group));
            }
            if self.ended {
                return Ok(None);
            }
            // `split_complete` left no newline: all of the buffer is one unfinished line (or one
            // that is too long).
            if self.buffer.len() > self.bytes_max {
                return Err(self.too_long());
            }
            if self.fill()? == 0 {
                self.ended = true;
                return Ok(self.last_line());
            }
        }
    }

    fn fill(&mut self) -> Result<usize, Error> {
        let before = self.buffer.len();
        // Small reads (a pipe, a person) share a chunk: lines in flight keep whole chunks alive.
        if self.buffer.capacity() - before < CHUNK_BYTES / 4 {
            self.buffer.reserve(CHUNK_BYTES);
        }
        self.buffer.resize(self.buffer.capacity(), 0);
        let read = loop {
            let room = self.buffer.get_mut(before..).unwrap_or_default();
            match self.source.read(room) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        self.buffer
            .truncate(before + read.as_ref().copied().unwrap_or(0));
        read.map_err(|source| {
            self.ended = true;
            Error::Read {
                number: self.number,
                source,
            }
        })
    }

    /// Takes the whole lines off the buffer, up to one that is too long.
    fn split_complete(&mut self) -> Group {
        let mut group = Group {
            first_number: self.number,
            lines: Vec::new(),
        };
        while let Some(at) = memchr::memchr(b'\n', self.buffer.get(self.scanned..).unwrap_or(&[])) {
            let length = self.scanned + at;
            if length > self.bytes_max {
                return group;
            }
            let mut line = self.buffer.split_to(length + 1);
            line.truncate(length);
            group.lines.push(line.freeze());
            self.number += 1;
            self.scanned = 0;
        }
        self.scanned = self.buffer.len();
        group
    }

    fn last_line(&mut self) -> Option<Group> {
        if self.buffer.is_empty() {
            return None;
        }
        let group = Group {
            first_number: self.number,
            lines: vec![self.buffer.split().freeze()],
        };
        self.number += 1;
        Some(group)
    }

    fn too_long(&mut self) -> Error {
        self.ended = true;
        self.buffer = BytesMut::new();
        self.scanned = 0;
        Error::TooLong {
            number: self.number,
            bytes_max: self.bytes_max,
        }
    }
}

/// Splits a line at the first `delimiter`: key and value. Without the delimiter there is no key
/// and all of it is the value. An empty delimiter is never found.
#[must_use]
pub fn split_key(line: &Bytes, delimiter: &[u8]) -> (Option<Bytes>, Bytes) {
    let found = match delimiter {
        [] => None,
        [byte] => memchr::memchr(*byte, line),
        longer => memchr::memmem::find(line, longer),
    };
    match found {
        Some(at) => (Some(line.slice(..at)), line.slice(at + delimiter.len()..)),
        None => (None, line.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives its bytes out `step` at a time.
    struct Dribble<'a> {
        bytes: &'a [u8],
        step: usize,
    }

    impl Read for Dribble<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let n = self.step.min(self.bytes.len()).min(out.len());
            out[..n].copy_from_slice(&self.bytes[..n]);
            self.bytes = &self.bytes[n..];
            Ok(n)
        }
    }

    fn all(bytes: &[u8], step: usize, bytes_max: usize) -> (Vec<Vec<u8>>, Option<Error>) {
        let mut lines = Lines::new(Dribble { bytes, step }, bytes_max);
        let mut out = Vec::new();
        loop {
            match lines.next_group() {
                Ok(Some(group)) => {
                    assert_eq!(group.first_number, out.len() as u64 + 1);
                    out.extend(group.lines.iter().map(|line| line.to_vec()));
                }
                Ok(None) => return (out, None),
                Err(error) => return (out, Some(error)),
            }
        }
    }

    #[test]
    fn lines_of_any_chunking_are_the_same_bytes() {
        let input = b"a\r\n\n\xff\0b\n  \nlast";
        let expected: Vec<Vec<u8>> = [&b"a\r"[..], b"", b"\xff\0b", b"  ", b"last"]
            .map(<[u8]>::to_vec)
            .to_vec();
        for step in [1, 2, 3, 5, 100] {
            let (lines, error) = all(input, step, 100);
            assert!(error.is_none());
            assert_eq!(lines, expected, "step {step}");
        }
    }

    #[test]
    fn lines_end_with_or_without_newline_give_no_extra_line() {
        assert_eq!(all(b"", 9, 9).0.len(), 0);
        assert_eq!(all(b"a", 9, 9).0.len(), 1);
        assert_eq!(all(b"a\n", 9, 9).0.len(), 1);
        assert_eq!(all(b"a\n\n", 9, 9).0.len(), 2);
        assert_eq!(all(b"\n", 9, 9).0, vec![Vec::<u8>::new()]);
    }

    #[test]
    fn line_of_exactly_the_limit_passes_and_one_more_is_refused_by_number() {
        for step in [1, 4, 100] {
            let (lines, error) = all(b"ab\nabc\nabcd\nx\n", step, 3);
            assert_eq!(lines, vec![b"ab".to_vec(), b"abc".to_vec()]);
            assert!(matches!(
                error,
                Some(Error::TooLong {
                    number: 3,
                    bytes_max: 3
                })
            ));
        }
        assert!(all(b"abc", 1, 3).1.is_none());
        assert!(all(b"abcd", 1, 3).1.is_some());
    }

    #[test]
    fn endless_line_is_refused_within_bounded_memory() {
        let mut lines = Lines::new(io::repeat(b'x'), 1024 * 1024);
        assert!(matches!(
            lines.next_group(),
            Err(Error::TooLong { number: 1, .. })
        ));
        assert!(matches!(lines.next_group(), Ok(None)));
    }

    #[test]
    fn lines_longer_than_a_chunk_come_whole() {
        let mut input = vec![b'y'; 3 * CHUNK_BYTES];
        input.push(b'\n');
        input.extend_from_slice(b"z");
        let (lines, error) = all(&input, usize::MAX, 4 * CHUNK_BYTES);
        assert!(error.is_none());
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[0].len(), 3 * CHUNK_BYTES);
    }

    #[test]
    fn failed_read_names_the_line() {
        struct Broken(bool);
        impl Read for Broken {
            fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
                if self.0 {
                    return Err(io::Error::other("gone"));
                }
                self.0 = true;
                out[..4].copy_from_slice(b"a\nbc");
                Ok(4)
            }
        }
        let mut lines = Lines::new(Broken(false), 9);
        assert_eq!(lines.next_group().unwrap().unwrap().lines.len(), 1);
        assert!(matches!(
            lines.next_group(),
            Err(Error::Read { number: 2, .. })
        ));
    }

    #[test]
    fn split_key_takes_the_first_delimiter() {
        let split = |line: &'static [u8], delimiter: &[u8]| {
            let (key, value) = split_key(&Bytes::from_static(line), delimiter);
            (key.map(|key| key.to_vec()), value.to_vec())
        };
        assert_eq!(
            split(b"k\tv\tw", b"\t"),
            (Some(b"k".to_vec()), b"v\tw".to_vec())
        );
        assert_eq!(split(b"k::v", b"::"), (Some(b"k".to_vec()), b"v".to_vec()));
        assert_eq!(split(b"\tv", b"\t"), (Some(Vec::new()), b"v".to_vec()));
        assert_eq!(split(b"k\t", b"\t"), (Some(b"k".to_vec()), Vec::new()));
        assert_eq!(split(b"plain", b"\t"), (None, b"plain".to_vec()));
        assert_eq!(split(b"", b"\t"), (None, Vec::new()));
        assert_eq!(
            split(b"\xff\xfev", b"\xfe"),
            (Some(b"\xff".to_vec()), b"v".to_vec())
        );
    }
}
