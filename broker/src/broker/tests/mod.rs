//! Whole brokers in this process, three to a cluster, over real stores and sockets.

mod cluster;
mod following;
mod partitions;
mod stopping;
