//! The gRPC services, one file each; [`pictures`] is what `Cluster` shows of the metadata.

pub mod cluster;
pub mod groups;
pub mod log;
pub mod peer;
mod pictures;
pub mod server;
