//! The gRPC services, one file each.

pub mod cluster;
pub mod log;
pub mod peer;
pub mod server;
