//! A program's hooks around records: before they are sent and after they are received.
//!
//! For what concerns all records of a program and none of them in particular: tracing, encryption,
//! counting, dead letters. Hooks run on the caller's task, in the order in which they were installed
//! before sending and in the opposite order after receiving, so that what one adds, the same one
//! takes away.

use crate::error::Error;
use crate::record::{ConsumedRecord, Record, RecordMetadata};

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
/// Hooks must not block: they run inside the futures and streams that the program awaits.
pub trait Interceptor: Send + Sync + 'static {
    /// Sees a record before its partition is chosen and it is taken in; may change all of it.
    ///
    /// # Errors
    /// The record is not taken in: [`crate::ErrorKind::Intercepted`], not written, with this error
    /// as its source.
    fn before_send(&self, _record: &mut Record) -> Result<(), HookError> {
        Ok(())
    }

    /// Sees what became of a record that was taken in, as its ticket does.
    fn after_send(&self, _fate: &Result<RecordMetadata, Error>) {}

    /// Sees a record before the program does; may change key, value and headers.
    ///
    /// # Errors
    /// The program gets [`crate::ErrorKind::Intercepted`] with topic, partition and offset in place
    /// of the record, with this error as its source; reading goes on behind it.
    fn after_receive(&self, _record: &mut ConsumedRecord) -> Result<Received, HookError> {
        Ok(Received::Deliver)
    }
}
