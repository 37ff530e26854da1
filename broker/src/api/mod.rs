//! The gRPC services, one file each.

pub mod server;
