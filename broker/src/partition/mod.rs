//! One replica of one partition.

pub mod directory;
pub mod door;
pub mod error;
pub mod intake;
pub mod ledger;
pub mod machine;
pub mod producers;
