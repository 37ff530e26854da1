//! Records on their way to standard output. Buffers of whole records are handed to the sink, one being
//! written while the next is filled; what is owed for a record is paid once the buffer that ends with
//! it is written, and never before.

use qute_client::ConsumedRecord;

use super::printer::Printer;
use crate::progress::Progress;
use crate::sink::{self, BUFFER_BYTES, Sink};

/// What is owed for records of one batch.
pub trait Receipt {
    /// The records up to this offset, which is included, are written.
    fn written(self, through: u64);
}

impl Receipt for () {
    fn written(self, _through: u64) {}
}

/// See the module header.
#[derive(Debug)]
pub struct Outlet<R> {
    printer: Printer,
    sink: Sink,
    /// Records still to be printed (`-n`).
    left: u64,
    /// Printed and not handed over.
    buffer: Vec<u8>,
    /// Of what is in the buffer.
    printed: Vec<(R, u64)>,
    /// Of what the sink is writing.
    leaving: Vec<(R, u64)>,
    progress: Progress,
}

impl<R: Receipt> Outlet<R> {
    /// Takes so many records at most.
    pub fn new(printer: Printer, sink: Sink, count: Option<u64>, progress: Progress) -> Self {
        Self {
            printer,
            sink,
            left: count.unwrap_or(u64::MAX),
            buffer: Vec::with_capacity(BUFFER_BYTES + BUFFER_BYTES / 4),
            printed: Vec::new(),
            leaving: Vec::new(),
            progress,
        }
    }

    /// Takes no more records.
    pub fn is_done(&self) -> bool {
        self.left == 0
    }

    /// Is to be written before it takes more.
    pub fn is_full(&self) -> bool {
        self.buffer.len() >= BUFFER_BYTES
    }

    /// Holds something that is not written yet.
    pub fn holds_something(&self) -> bool {
        !self.buffer.is_empty() || self.sink.is_writing()
    }

    /// Prints records of one batch, as many as are wanted.
    pub fn print(&mut self, records: &[ConsumedRecord], receipt: R) {
        let before = self.buffer.len();
        let mut count = 0;
        let mut last = None;
        for record in records {
            if self.left == 0 {
                break;
            }
            self.printer.print(record, &mut self.buffer);
            self.left -= 1;
            count += 1;
            last = Some(record.offset);
        }
        if let Some(through) = last {
            self.printed.push((receipt, through));
        }
        let bytes = self.buffer.len() - before;
        self.progress
            .add(count, u64::try_from(bytes).unwrap_or(u64::MAX));
    }

    /// Hands over what is printed, once what was handed over before is written.
    ///
    /// # Errors
    /// What was handed over before could not be written.
    ///
    /// # Cancel safety
    /// Cancelled, it can be called again.
    pub async fn write(&mut self) -> Result<(), sink::Error> {
        self.sink.flush().await?;
        self.pay();
        self.sink.write(&mut self.buffer).await?;
        self.leaving.append(&mut self.printed);
        if !self.sink.is_writing() {
            // There were no bytes: a format that prints nothing.
            self.pay();
        }
        Ok(())
    }

    /// Ends the output: nothing more is printed afterwards.
    pub fn end(&mut self) {
        self.left = 0;
        self.printer.end(&mut self.buffer);
    }

    /// Waits until everything is written.
    ///
    /// # Errors
    /// It could not be.
    ///
    /// # Cancel safety
    /// Cancelled, it can be called again.
    pub async fn flush(&mut self) -> Result<(), sink::Error> {
        self.write().await?;
        self.sink.flush().await?;
        self.pay();
        Ok(())
    }

    fn pay(&mut self) {
        for (receipt, through) in self.leaving.drain(..) {
            receipt.written(through);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::OwnedFd;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::args::Output;
    use crate::text::format::Format;

    #[derive(Clone, Default)]
    struct Paid(Arc<Mutex<Vec<u64>>>);

    impl Receipt for Paid {
        fn written(self, through: u64) {
            self.0.lock().unwrap().push(through);
        }
    }

    impl Paid {
        fn offsets(&self) -> Vec<u64> {
            self.0.lock().unwrap().clone()
        }
    }

    fn outlet(format: &str, count: Option<u64>) -> (std::io::PipeReader, Outlet<Paid>) {
        let (reader, writer) = std::io::pipe().unwrap();
        let (sink, _) = Sink::over(OwnedFd::from(writer)).unwrap();
        let printer = Printer::new(Format::parse(format).ok(), Output::Raw).unwrap();
        let progress = Progress::records("", None);
        (reader, Outlet::new(printer, sink, count, progress))
    }

    fn records(offsets: std::ops::Range<u64>, bytes: usize) -> Vec<ConsumedRecord> {
        let record = |offset| ConsumedRecord {
            topic: "t".into(),
            partition: 0,
            offset,
            timestamp_ms: 0,
            broker_time_ms: 0,
            key: None,
            value: Some(vec![b'x'; bytes].into()),
            headers: Vec::new(),
        };
        offsets.map(record).collect()
    }

    #[tokio::test]
    async fn receipt_is_paid_once_the_bytes_are_written() {
        let (mut reader, mut outlet) = outlet(r"%v\n", None);
        let paid = Paid::default();
        outlet.print(&records(0..3, 1), paid.clone());
        assert!(outlet.holds_something());
        assert!(paid.offsets().is_empty());
        outlet.flush().await.unwrap();
        assert_eq!(paid.offsets(), [2]);
        assert!(!outlet.holds_something());
        let mut text = [0; 6];
        reader.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"x\nx\nx\n");
    }

    #[tokio::test]
    async fn receipt_of_what_a_stalled_reader_holds_up_is_not_paid() {
        let (_reader, mut outlet) = outlet("%v", None);
        let paid = Paid::default();
        // More than a pipe holds.
        outlet.print(&records(0..1, 4 << 20), paid.clone());
        outlet.write().await.unwrap();
        outlet.print(&records(1..2, 1), paid.clone());
        tokio::select! {
            biased;
            _ = outlet.write() => unreachable!("nobody reads"),
            () = tokio::task::yield_now() => {}
        }
        assert!(paid.offsets().is_empty());
    }

    #[tokio::test]
    async fn receipt_of_what_a_reader_left_behind_is_not_paid() {
        let (reader, mut outlet) = outlet("%v", None);
        let paid = Paid::default();
        outlet.print(&records(0..1, 1), paid.clone());
        outlet.flush().await.unwrap();
        drop(reader);
        outlet.print(&records(1..2, 1), paid.clone());
        assert!(matches!(outlet.flush().await, Err(sink::Error::Closed)));
        assert_eq!(paid.offsets(), [0]);
    }

    #[tokio::test]
    async fn receipt_of_a_batch_cut_by_the_count_names_the_last_record_printed() {
        let (_reader, mut outlet) = outlet("%v", Some(2));
        let paid = Paid::default();
        outlet.print(&records(5..9, 1), paid.clone());
        assert!(outlet.is_done());
        outlet.print(&records(9..12, 1), paid.clone());
        outlet.flush().await.unwrap();
        assert_eq!(paid.offsets(), [6]);
    }

    #[tokio::test]
    async fn receipt_of_records_that_print_nothing_is_paid_too() {
        let (_reader, mut outlet) = outlet("%k", None);
        let paid = Paid::default();
        outlet.print(&records(0..3, 1), paid.clone());
        outlet.write().await.unwrap();
        assert_eq!(paid.offsets(), [2]);
    }
}
