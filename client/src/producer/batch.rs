//! A batch in flight: its bytes, sealed when it is sent and again if its producer stamp changes, and
//! its fate.

use bytes::Bytes;
use qute_proto::batch::{ProducerStamp, UnsealedBatch, reseal};
use tokio::time::Instant;

use super::fate::Fate;
use super::flight::Lost;
use crate::error::{Error, Outcome};

/// A batch in flight.
pub(super) struct Batch {
    pub(super) body: Body,
    pub(super) fate: Fate,
    pub(super) expires_at: Instant,
    /// When it was sent first.
    pub(super) sent_at: Option<Instant>,
}

pub(super) enum Body {
    Unsealed(UnsealedBatch),
    Sealed(Bytes, ProducerStamp),
    /// Only while it changes from one to the other.
    Empty,
}

impl Body {
    /// The batch's bytes under this stamp.
    pub(super) fn sealed(&mut self, stamp: ProducerStamp) -> Option<Bytes> {
        let bytes = match std::mem::replace(self, Self::Empty) {
            Self::Unsealed(batch) => batch.seal(stamp),
            Self::Sealed(bytes, sealed_for) if sealed_for == stamp => bytes,
            Self::Sealed(bytes, _) => reseal(&bytes, stamp).ok()?,
            Self::Empty => return None,
        };
        *self = Self::Sealed(bytes.clone(), stamp);
        Some(bytes)
    }
}

/// Gives lost batches their fate.
pub(super) fn fail(lost: impl IntoIterator<Item = Lost<Batch>>, error: &Error) {
    for batch in lost {
        let outcome = if batch.doubtful {
            Outcome::Unknown
        } else {
            Outcome::NotWritten
        };
        batch.payload.fate.failed(error.clone(), outcome);
    }
}
