//! One replica of one partition.
