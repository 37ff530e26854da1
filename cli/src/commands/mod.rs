//! One module per command.

pub mod dev;
pub mod partition_of;
