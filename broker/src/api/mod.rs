//! The gRPC services, one file each.

pub mod log;
pub mod server;
