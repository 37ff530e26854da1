//! One module per command.

pub mod partition_of;
