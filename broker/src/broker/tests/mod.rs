//! Whole brokers in this process, three to a cluster, over real stores and sockets.

mod cluster;
mod following;
mod groups;
mod groups_topic;
mod partitions;
mod settings;
mod stopping;
