//! The Qute client: producer, consumer and administration.
//!
//! The client is the smart half of Qute: it caches metadata, hashes keys to partitions, talks to
//! the leader of each partition directly, batches, retries and follows leaders. A leader's
//! failover is invisible to a program apart from latency: nothing acknowledged is lost, retries
//! make no duplicates, and the records of a key keep their order.
//!
//! ```no_run
//! use futures::StreamExt;
//! use qute_client::{Client, Position, ProducerConfig, Record, TopicSpec};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect("127.0.0.1:7700").await?;
//! client.create_topic(TopicSpec::new("flights").partitions(6)).await?;
//!
//! let producer = client.producer(ProducerConfig::default())?;
//! let written = producer.send(Record::to("flights").key("UA").value("SFO")).await?;
//! println!("at {}/{}", written.partition, written.offset);
//! producer.close(std::time::Duration::from_secs(10)).await;
//!
//! let mut records = client.consumer("flights").start(Position::Start).until_end().open().await?;
//! while let Some(record) = records.next().await {
//!     let record = record?;
//!     println!("{:?} = {:?}", record.key, record.value);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | module | holds |
//! | --- | --- |
//! | `client` | [`Client`]: the connected handle that everything starts from |
//! | `config` | settings of a client and their defaults |
//! | `interceptor` | [`Interceptor`]: a program's hooks before send and after receive |
//! | `error` | [`Error`]: kind, retriable or not, outcome of a write, place, cause per endpoint |
//! | `record` | [`Record`], [`RecordMetadata`], [`ConsumedRecord`] |
//! | `net` | connections, breakers, routes: everything with a deadline |
//! | `metadata` | the view of the cluster: immutable snapshots that never go back (S28) |
//! | `codec`, `typed` | [`Codec`], [`TypedProducer`], [`TypedConsumer`]: a program's types in place of bytes |
//! | `dead_letter` | [`DeadLetter`]: records set aside |
//! | `trace_context` | [`TraceContext`]: W3C trace context in headers |
//! | `stats` | [`ClientStats`]: what a client has done, in numbers |
//! | [`trace`] | names of the `tracing` spans and events |
//! | `admin` | topics, brokers, offsets |
//! | `producer` | [`Producer`]: batches, sequences, retries |
//! | `consumer` | [`Consumer`]: subscriptions, credit, following leaders |

#![warn(missing_docs)]

#[cfg(test)]
extern crate self as qute_client;

#[cfg(feature = "bench-internals")]
#[doc(hidden)]
pub mod bench_internals;

mod admin;
mod client;
mod codec;
mod config;
mod consumer;
mod dead_letter;
mod error;
mod interceptor;
mod metadata;
mod net;
mod producer;
mod record;
mod stats;
pub mod trace;
mod trace_context;
mod typed;

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "test code")]
#[path = "../tests/fake/mod.rs"]
mod fake;

pub use admin::{
    BrokerDescription, BrokerState, ClusterInfo, ListedOffset, OffsetQuery, OffsetSpec,
    PartitionDescription, ReplicaDescription, ReplicaRole, TopicDescription, TopicSpec,
};
pub use client::Client;
#[cfg(feature = "json")]
pub use codec::JsonCodec;
pub use codec::{BytesCodec, Codec, CodecError, Utf8Codec};
pub use config::{Bootstrap, ClientConfig};
pub use consumer::{
    BatchConsumer, Bound, Buffered, ConsumedBatch, Consumer, ConsumerBuilder, ConsumerControl,
    ConsumerEvent, EventConsumer, OutOfRange, Position,
};
pub use dead_letter::{DeadLetter, DeadLetterOrigin};
pub use error::{EndpointFailure, Error, ErrorKind, OffsetBounds, Outcome, Result};
pub use interceptor::{HookError, Interceptor, Received};
pub use producer::{
    CloseReport, PartitionLoad, Partitioner, Producer, ProducerConfig, ProducerSink, Reservation,
    Ticket, TopicLoad, TopicTemplate, Undelivered,
};
pub use qute_proto::batch::{Codec as Compression, RecordHeader};
pub use qute_proto::ids::{BrokerId, ClusterId, TopicId};
pub use qute_proto::partition::partition_of;
pub use record::{ConsumedRecord, Record, RecordMetadata};
pub use stats::{ClientStats, LatencyStats};
pub use trace_context::{TraceContext, TraceContextLayer};
pub use typed::{TypedConsumer, TypedProducer, TypedRecord};
