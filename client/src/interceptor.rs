//! A program's hooks around records: before they are sent and after they are received.
//!
//! For what concerns all records of a program and none of them in particular: tracing, encryption,
//! counting, dead letters.
//!
//! Hooks run in the order in which they were installed before sending, those of the client before
//! those of the producer, and in the opposite order after receiving and after sending, so that what
//! one adds, the same one takes away:
//!
//! ```text
//!  before_send    client 1 -> client 2 -> producer 1 -> producer 2 -> partition, batch, broker
//!  after_receive  client 1 <- client 2 <- consumer 1 <- consumer 2 <- batch from the broker
//! ```
//!
//! Where no hook is installed, the check of an empty list is all that they cost.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tracing::error;

use crate::error::{Error, ErrorKind, Result};
use crate::record::{ConsumedRecord, Record, RecordMetadata};
use crate::trace;

/// Why a hook refuses a record; any error of the program's.
pub type HookError = Box<dyn std::error::Error + Send + Sync>;

/// What becomes of a received record after a hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// The program gets it.
    Deliver,
    /// The program does not get it; its offset counts as read.
    Skip,
}

/// Hooks around records. Every method has a default that does nothing.
///
/// Hooks must not block: they run inside the futures and streams that the program awaits, and
/// [`Interceptor::after_send`] inside the producer's task of the partition.
pub trait Interceptor: Send + Sync + 'static {
    /// Sees a record before its partition is chosen and it is taken in; may change all of it.
    ///
    /// # Errors
    /// The record is not taken in: [`crate::ErrorKind::Intercepted`], not written, with this error
    /// as its source.
    fn before_send(&self, _record: &mut Record) -> std::result::Result<(), HookError> {
        Ok(())
    }

    /// Sees what became of a record that was taken in, as its ticket does, just before it. Not
    /// called for a record that was not taken in: who sent it was told at once. A panic is logged
    /// and changes nothing.
    fn after_send(&self, _fate: &Result<RecordMetadata>) {}

    /// Sees a record before the program does; may change key, value and headers.
    ///
    /// # Errors
    /// The program gets [`crate::ErrorKind::Intercepted`] with topic, partition and offset in place
    /// of the record, with this error as its source and the record, as far as hooks had changed it,
    /// in [`Error::record`]; reading goes on behind it.
    fn after_receive(
        &self,
        _record: &mut ConsumedRecord,
    ) -> std::result::Result<Received, HookError> {
        Ok(Received::Deliver)
    }
}

/// The installed hooks, in order of installation. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Hooks(Vec<Arc<dyn Interceptor>>);

impl Hooks {
    pub(crate) fn install(&mut self, hook: impl Interceptor) {
        self.0.push(Arc::new(hook));
    }

    /// These, and then those of `inner`, which are nearer to the broker.
    pub(crate) fn around(&self, inner: &Self) -> Self {
        Self(self.0.iter().chain(&inner.0).cloned().collect())
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// # Errors
    /// [`ErrorKind::Intercepted`], from the first hook that refuses.
    #[inline]
    pub(crate) fn before_send(&self, record: &mut Record) -> Result<()> {
        for hook in &self.0 {
            hook.before_send(record)
                .map_err(|cause| refused("before it was sent", cause))?;
        }
        Ok(())
    }

    pub(crate) fn after_send(&self, fate: &Result<RecordMetadata>) {
        for hook in self.0.iter().rev() {
            // It runs where all records of the partition have their fate decided: theirs must not
            // hang on it.
            if catch_unwind(AssertUnwindSafe(|| hook.after_send(fate))).is_err() {
                error!(target: trace::PRODUCE, "a hook panicked after a record was sent");
            }
        }
    }

    /// # Errors
    /// [`ErrorKind::Intercepted`], from the first hook that refuses.
    #[inline]
    pub(crate) fn after_receive(&self, record: &mut ConsumedRecord) -> Result<Received> {
        for hook in self.0.iter().rev() {
            match hook.after_receive(record) {
                Ok(Received::Deliver) => {}
                Ok(Received::Skip) => return Ok(Received::Skip),
                Err(cause) => {
                    let error = refused("after it was received", cause)
                        .at(&record.topic, record.partition)
                        .with_offset(record.offset);
                    return Err(error.with_record(record.clone()));
                }
            }
        }
        Ok(Received::Deliver)
    }
}

impl fmt::Debug for Hooks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} hooks", self.0.len())
    }
}

fn refused(when: &str, cause: HookError) -> Error {
    let message = format!("a hook refused the record {when}: {cause}");
    Error::new(ErrorKind::Intercepted, message).with_boxed_source(cause)
}
