//! A newtype for each id and offset, so that none is mistaken for another.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }
    };
}

number!(
    /// A broker: random, made with its data directory (S9). 0 is nobody.
    BrokerId
);
number!(
    /// One replica of one partition: handed out once by the controller (S9). The Raft node id.
    ReplicaId
);
number!(
    /// Position of a record in its partition. Ranges are half-open.
    Offset
);
number!(
    /// A producer's 64-bit random identity.
    ProducerId
);

macro_rules! uuid_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new random id.
            #[must_use]
            pub fn random() -> Self {
                Self(Uuid::new_v4())
            }

            /// Reads 16 bytes; `None` for any other length.
            #[must_use]
            pub fn from_wire(bytes: &[u8]) -> Option<Self> {
                Uuid::from_slice(bytes).ok().map(Self)
            }

            /// The 16 bytes that travel on the wire.
            #[must_use]
            pub fn to_wire(self) -> bytes::Bytes {
                bytes::Bytes::copy_from_slice(self.0.as_bytes())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0.hyphenated(), f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0.hyphenated())
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                text.parse().map(Self)
            }
        }
    };
}

uuid_newtype!(
    /// One incarnation of a topic: a topic deleted and made again gets a new one.
    TopicId
);
uuid_newtype!(
    /// A member of a consumer group, chosen by itself.
    MemberId
);
uuid_newtype!(
    /// A cluster, for its whole life.
    ClusterId
);

impl TopicId {
    /// The topic id of `__cluster`, the same in every cluster.
    pub const CLUSTER: Self = Self(Uuid::from_u128(1));
    /// The topic id of `__groups`, the same in every cluster.
    pub const GROUPS: Self = Self(Uuid::from_u128(2));
}

/// A partition of one topic incarnation: what a Raft group is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionId {
    /// The topic incarnation.
    pub topic: TopicId,
    /// Number of the partition within the topic, from 0.
    pub partition: u32,
}

impl PartitionId {
    /// The one partition of `__cluster`.
    pub const CLUSTER: Self = Self {
        topic: TopicId::CLUSTER,
        partition: 0,
    };
}

impl fmt::Display for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)
    }
}

impl fmt::Debug for PartitionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PartitionId({self})")
    }
}
