//! How a broker comes to belong to a cluster (S21): founding one, or joining one.

pub mod machine;
