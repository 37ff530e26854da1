//! The gRPC services, one file each.
