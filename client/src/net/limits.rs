//! What the brokers accept, as each told when it was connected to (`Hello`).

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use qute_proto::batch::{BATCH_BYTES_MAX, RECORD_BYTES_MAX, UNCOMPRESSED_BYTES_MAX};
use qute_proto::v1;

use super::Address;

/// Sizes in bytes that every broker of the cluster accepts: of each the smallest that any broker
/// told. Until one has told, the defaults of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BrokerLimits {
    /// One record, encoded.
    pub(crate) record_bytes_max: usize,
    /// One batch as it travels.
    pub(crate) batch_bytes_max: usize,
    /// One batch after decompression.
    pub(crate) uncompressed_batch_bytes_max: usize,
}

impl Default for BrokerLimits {
    fn default() -> Self {
        Self {
            record_bytes_max: RECORD_BYTES_MAX,
            batch_bytes_max: BATCH_BYTES_MAX,
            uncompressed_batch_bytes_max: UNCOMPRESSED_BYTES_MAX,
        }
    }
}

impl BrokerLimits {
    /// What a broker told. It can't raise what the batch format allows, and 0 says nothing.
    fn told(limits: Option<&v1::Limits>) -> Self {
        let most = Self::default();
        let Some(limits) = limits else { return most };
        let capped = |told: u64, most: usize| match usize::try_from(told) {
            Ok(0) | Err(_) => most,
            Ok(told) => told.min(most),
        };
        Self {
            record_bytes_max: capped(limits.record_bytes_max, most.record_bytes_max),
            batch_bytes_max: capped(limits.batch_bytes_max, most.batch_bytes_max),
            uncompressed_batch_bytes_max: capped(
                limits.uncompressed_batch_bytes_max,
                most.uncompressed_batch_bytes_max,
            ),
        }
    }

    fn smallest(self, other: Self) -> Self {
        Self {
            record_bytes_max: self.record_bytes_max.min(other.record_bytes_max),
            batch_bytes_max: self.batch_bytes_max.min(other.batch_bytes_max),
            uncompressed_batch_bytes_max: self
                .uncompressed_batch_bytes_max
                .min(other.uncompressed_batch_bytes_max),
        }
    }
}

/// The limits of the brokers that were connected to.
#[derive(Debug, Default)]
pub(super) struct KnownLimits {
    /// The last word of each; held for a look-up.
    told: Mutex<HashMap<Address, BrokerLimits>>,
    common: ArcSwap<BrokerLimits>,
}

impl KnownLimits {
    pub(super) fn common(&self) -> BrokerLimits {
        **self.common.load()
    }

    pub(super) fn learn(&self, address: &Address, limits: Option<&v1::Limits>) {
        let mut told = self.told.lock();
        told.insert(Arc::clone(address), BrokerLimits::told(limits));
        self.store(&told);
    }

    /// Forgets brokers that have left or moved.
    pub(super) fn retain(&self, keep: impl Fn(&Address) -> bool) {
        let mut told = self.told.lock();
        told.retain(|address, _| keep(address));
        self.store(&told);
    }

    fn store(&self, told: &HashMap<Address, BrokerLimits>) {
        let common = told
            .values()
            .fold(BrokerLimits::default(), |all, one| all.smallest(*one));
        self.common.store(Arc::new(common));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(record: u64, batch: u64) -> v1::Limits {
        v1::Limits {
            record_bytes_max: record,
            batch_bytes_max: batch,
            ..Default::default()
        }
    }

    #[test]
    fn limits_are_the_smallest_of_all_brokers_that_are_there() {
        let known = KnownLimits::default();
        assert_eq!(known.common(), BrokerLimits::default());
        known.learn(&"a:1".into(), Some(&limits(1000, 5000)));
        known.learn(&"b:1".into(), Some(&limits(2000, 4000)));
        let common = known.common();
        assert_eq!(
            (common.record_bytes_max, common.batch_bytes_max),
            (1000, 4000)
        );
        known.retain(|address| &**address == "b:1");
        assert_eq!(known.common().record_bytes_max, 2000);
        known.learn(&"b:1".into(), Some(&limits(3000, 4000)));
        assert_eq!(
            known.common().record_bytes_max,
            3000,
            "the last word counts"
        );
    }

    #[test]
    fn limits_beyond_the_format_or_of_zero_change_nothing() {
        let known = KnownLimits::default();
        known.learn(&"a:1".into(), Some(&limits(u64::MAX, 0)));
        known.learn(&"b:1".into(), None);
        assert_eq!(known.common(), BrokerLimits::default());
    }
}
