//! What Qute brokers and clients share.
//!
//! | module | holds |
//! | --- | --- |
//! | [`v1`] | the public gRPC messages and services |
//! | [`internal`] | broker-to-broker messages and services |
//! | [`group`] | the rules of group names |
//! | [`ids`] | a newtype for each id and offset |
//! | [`batch`] | the record batch: builder and zero-copy view |
//! | [`partition`] | which partition a key belongs to |
//! | [`topic`] | the rules of topic names |

#![warn(missing_docs)]

pub mod batch;
pub mod group;
pub mod ids;
pub mod partition;
pub mod topic;

/// The encoded descriptors of all messages and services, for gRPC reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Credit that one fetch stream can save up, in bytes: brokers cut off what is granted beyond, so
/// clients must not count on more.
pub const FETCH_CREDIT_BYTES_MAX: u32 = 1 << 30;

/// The public API, package `qute.v1`.
#[allow(missing_docs, clippy::all, clippy::pedantic)]
pub mod v1 {
    tonic::include_proto!("qute.v1");
}

/// Broker to broker, package `qute.internal.v1`.
pub mod internal {
    pub use v1::*;

    /// Generated code; used through [`super::internal`].
    #[allow(missing_docs, clippy::all, clippy::pedantic)]
    pub mod v1 {
        tonic::include_proto!("qute.internal.v1");
    }
}
