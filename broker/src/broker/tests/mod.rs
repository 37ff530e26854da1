//! Whole brokers in this process, three to a cluster, over real stores and sockets.

mod cluster;
mod partitions;
mod stopping;
