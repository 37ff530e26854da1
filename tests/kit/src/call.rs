//! The calls that brokers serve to clients, by name.

use std::fmt;

/// A call that passes through a [`crate::Proxy`].
///
/// Of streaming calls ([`Call::Produce`], [`Call::Fetch`]) faults and counts concern the messages
/// on the stream: each produce request with its answer, each subscription with its batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Call {
    /// Identity and limits of a broker.
    Hello,
    /// One view of the cluster.
    Metadata,
    /// Views of the cluster, pushed.
    WatchMetadata,
    /// The state of the cluster as one broker sees it.
    DescribeCluster,
    /// A topic made.
    CreateTopic,
    /// A topic deleted.
    DeleteTopic,
    /// Partitions added to a topic.
    AddPartitions,
    /// Batches written.
    Produce,
    /// Batches read.
    Fetch,
    /// Offsets by position or time.
    ListOffsets,
    /// Any call that this kit has no name for; they pass, and can be counted, delayed and cut.
    Other,
}

const PATHS: &[(Call, &str)] = &[
    (Call::Hello, "/qute.v1.Cluster/Hello"),
    (Call::Metadata, "/qute.v1.Cluster/Metadata"),
    (Call::WatchMetadata, "/qute.v1.Cluster/WatchMetadata"),
    (Call::DescribeCluster, "/qute.v1.Cluster/DescribeCluster"),
    (Call::CreateTopic, "/qute.v1.Cluster/CreateTopic"),
    (Call::DeleteTopic, "/qute.v1.Cluster/DeleteTopic"),
    (Call::AddPartitions, "/qute.v1.Cluster/AddPartitions"),
    (Call::Produce, "/qute.v1.Log/Produce"),
    (Call::Fetch, "/qute.v1.Log/Fetch"),
    (Call::ListOffsets, "/qute.v1.Log/ListOffsets"),
];

impl Call {
    pub(crate) fn of_path(path: &str) -> Self {
        let found = PATHS.iter().find(|(_, known)| *known == path);
        found.map_or(Self::Other, |&(call, _)| call)
    }

    /// The client may send more than one message, when it likes. What has no name may be anything,
    /// so it is treated like that.
    pub(crate) fn is_two_way(self) -> bool {
        matches!(self, Self::Produce | Self::Fetch | Self::Other)
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_the_paths_that_the_services_have() {
        let descriptors = String::from_utf8_lossy(qute_proto::DESCRIPTORS);
        for (call, path) in PATHS {
            assert_eq!(Call::of_path(path), *call);
            let method = path.rsplit('/').next().unwrap();
            assert!(descriptors.contains(method), "{path}");
        }
        assert_eq!(Call::of_path("/grpc.health.v1.Health/Check"), Call::Other);
    }
}
