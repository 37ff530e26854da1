//! One module per command.

pub mod bench;
pub mod cluster;
pub mod consume;
pub mod context;
pub mod dev;
pub mod doctor;
pub mod group;
pub mod man;
pub mod partition_of;
pub mod produce;
pub mod top;
pub mod topic;
