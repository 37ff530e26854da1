//! Room in the buffer that is taken before there is a record: [`Reservation`].

use std::fmt;
use std::sync::Arc;

use tokio::time::timeout_at;

use super::budget::Taken;
use super::fate::Ticket;
use super::intake::{Inner, refused};
use crate::error::{Error, ErrorKind, Result};
use crate::record::Record;

/// Room in a producer's buffer, made by [`crate::Producer::reserve`]. Records are taken in against it
/// without waiting. What is left of it is given back when it is dropped.
///
/// It counts as a handle of the producer. Room that is reserved is taken from the whole buffer: a
/// partition that is at its limit takes records from a reservation all the same.
pub struct Reservation {
    inner: Arc<Inner>,
    taken: Taken,
}

impl Reservation {
    pub(super) async fn make(inner: &Arc<Inner>, bytes: usize) -> Result<Self> {
        if bytes > inner.budget.size() {
            let size = inner.budget.size();
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!("{bytes} bytes are more than the buffer of {size}"),
            ));
        }
        if inner.budget.free() < bytes {
            inner.hurry_all();
        }
        match timeout_at(inner.deadline(), inner.budget.take(bytes)).await {
            Ok(Ok(taken)) => Ok(Self {
                inner: Arc::clone(inner),
                taken,
            }),
            Ok(Err(_)) => Err(Error::closed("producer")),
            Err(_) => Err(inner.buffer_full()),
        }
    }

    /// Bytes that are left.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.taken.bytes()
    }

    /// Takes a record in, at its [`Record::buffered_bytes`], without waiting; see
    /// [`crate::Producer::enqueue`].
    ///
    /// # Errors
    /// The record was not taken in, and the reservation is what it was:
    /// [`ErrorKind::InvalidArgument`] if the record is larger than what is left;
    /// [`ErrorKind::NotReady`] if nothing is known of the topic yet (see
    /// [`crate::Producer::prepare`]); [`ErrorKind::UnknownPartition`],
    /// [`ErrorKind::RecordTooLarge`], [`ErrorKind::Intercepted`], [`ErrorKind::Closed`].
    pub fn enqueue(&mut self, mut record: Record) -> Result<Ticket> {
        let taken_in = match self.inner.config.hooks.before_send(&mut record) {
            Ok(()) => self.take_in(&record),
            Err(error) => Err(error),
        };
        taken_in.map_err(|error| refused(error, &record))
    }

    fn take_in(&mut self, record: &Record) -> Result<Ticket> {
        let inner = &self.inner;
        if inner.is_closed() {
            return Err(Error::closed("producer"));
        }
        let (encoded, bytes) = inner.measure(record)?;
        if bytes > self.taken.bytes() {
            let left = self.taken.bytes();
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                format!(
                    "a record of {bytes} bytes is more than the {left} left of the reservation"
                ),
            ));
        }
        let Some(topic) = inner.shared.metadata.known_topic(&record.topic) else {
            return Err(Error::new(
                ErrorKind::NotReady,
                "nothing is known of the topic yet: prepare it first",
            ));
        };
        let queues = inner.queues_of(&topic);
        let target = queues.target(inner, &topic, record, bytes)?;
        let queue = queues.queue(inner, target.partition)?;
        let deadline = inner.deadline();
        if let Some(error) = queue.closed() {
            return Err(error);
        }
        if !queue.room.take_from(&mut self.taken, bytes) {
            return Err(Error::closed("reservation"));
        }
        let pushed = queue.push_reserved(&encoded, bytes, deadline);
        if pushed.is_err() {
            // Closed meanwhile.
            queue.room.return_to(&mut self.taken, bytes);
        }
        pushed
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("bytes", &self.taken.bytes())
            .finish_non_exhaustive()
    }
}
