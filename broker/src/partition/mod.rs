//! One replica of one partition.

pub mod producers;
