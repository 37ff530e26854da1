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
//! # async fn example() -> qute_client::Result<()> {
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
//! How to get at-least-once, exactly-once, low latency and the like: `docs/CLIENT.md`, the cookbook.
//!
//! # Module map
//!
//! | module | holds |
//! | --- | --- |
//! | `client` | [`Client`]: the connected handle that everything starts from |
//! | `config` | [`ClientConfig`], [`Bootstrap`]: settings of a client and their defaults |
//! | `error` | [`Error`]: kind, retriable or not, outcome of a write, place, cause per endpoint |
//! | `record` | [`Record`], [`RecordMetadata`], [`ConsumedRecord`] |
//! | `net` | connections, breakers, routes: everything with a deadline |
//! | `metadata` | the view of the cluster: immutable snapshots that never go back (S28) |
//! | `admin` | topics, brokers, offsets |
//! | `producer` | [`Producer`]: partitions, batches, sequences, retries |
//! | `consumer` | [`Consumer`]: subscriptions, credit, following leaders |
//! | [`group`] | [`group::GroupConsumer`], [`group::GroupAdmin`]: consumer groups |
//! | `codec`, `typed` | [`Codec`], [`TypedProducer`], [`TypedConsumer`]: a program's types in place of bytes |
//! | `interceptor` | [`Interceptor`]: a program's hooks before send and after receive |
//! | `dead_letter` | [`DeadLetter`]: records set aside |
//! | `trace_context` | [`TraceContext`]: W3C trace context in headers |
//! | [`trace`] | names of the `tracing` spans and events |
//! | `stats` | [`ClientStats`]: what a client has done, in numbers |
//!
//! # Connecting
//!
//! Several addresses, of which one has to answer; or what the environment says
//! ([`ClientConfig::from_env`]). Every call ends by its deadline, and an error names the cause for each
//! address.
//!
//! ```no_run
//! # use qute_client::{Client, ClientConfig};
//! # async fn example() -> qute_client::Result<()> {
//! let config = ClientConfig::new("qute://broker-1,broker-2:7701")?.client_name("billing");
//! let client = match Client::connect_with(config).await {
//!     Ok(client) => client,
//!     Err(error) => {
//!         for failure in error.endpoints() {
//!             eprintln!("{}: {}", failure.endpoint, failure.cause);
//!         }
//!         return Err(error);
//!     }
//! };
//! # Ok(())
//! # }
//! ```
//!
//! # Metadata and routing
//!
//! Nothing to call: views of the cluster are pushed, refreshed with age and after failures (one refresh
//! in flight, however many callers wait), and never go back. A leader's hint is obeyed only with a
//! newer epoch; else the client backs off. What only a leader can do goes straight to it, what any
//! broker can serve to the less busy one of two; a broker that fails again and again is left alone for
//! a while. To see it:
//!
//! ```no_run
//! # async fn example(client: qute_client::Client) -> qute_client::Result<()> {
//! for partition in client.describe_topic("flights").await?.partitions {
//!     println!("{}: {:?} in epoch {}", partition.partition, partition.leader, partition.leader_epoch);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Partitioners
//!
//! By key ([`partition_of`]), or where the record says, or, without either, to whichever partition is
//! fastest. Or by a rule of the program's:
//!
//! ```no_run
//! use qute_client::{Client, Partitioner, ProducerConfig, Record, TopicLoad, partition_of};
//!
//! /// Keys read `tenant/rest`: a tenant's records stay together.
//! struct ByTenant;
//!
//! impl Partitioner for ByTenant {
//!     fn partition(&self, record: &Record, topic: &TopicLoad<'_>) -> Option<u32> {
//!         let tenant = record.key.as_deref()?.split(|byte| *byte == b'/').next()?;
//!         Some(partition_of(tenant, topic.partitions()))
//!     }
//! }
//!
//! # fn example(client: Client) -> qute_client::Result<()> {
//! let producer = client.producer(ProducerConfig::default().partitioner(ByTenant))?;
//! # Ok(())
//! # }
//! ```
//!
//! # Producing
//!
//! [`Producer::send`] waits for the acknowledgement, [`Producer::enqueue`] for room in the buffer only,
//! [`Producer::sink`] is a `Sink`, [`Producer::reserve`] takes room beforehand. Each write ends as
//! [`Outcome::Ok`], [`Outcome::NotWritten`] or [`Outcome::Unknown`].
//!
//! ```no_run
//! use std::time::Duration;
//! use qute_client::{Compression, ProducerConfig, Record, TopicTemplate};
//!
//! # async fn example(client: qute_client::Client) -> qute_client::Result<()> {
//! let config = ProducerConfig::default()
//!     .linger(Duration::from_millis(5))
//!     .compression(Compression::Lz4)
//!     .create_topics(TopicTemplate::default().partitions(6));
//! let producer = client.producer(config)?;
//! let first = producer.enqueue(Record::to("flights").key("UA").value("SFO")).await?;
//! let second = producer.enqueue(Record::to("flights").key("UA").value("IAH")).await?;
//! for ticket in [first, second] {
//!     match ticket.await {
//!         Ok(written) => println!("at {}/{}", written.partition, written.offset),
//!         Err(error) => println!("{:?}: {error}", error.outcome()),
//!     }
//! }
//! let report = producer.close(Duration::from_secs(10)).await;
//! assert!(report.is_clean(), "{:?}", report.undelivered);
//! # Ok(())
//! # }
//! ```
//!
//! # Consuming
//!
//! A stream of records ([`Consumer`]), of batches ([`Consumer::into_batches`]) or of all that happens
//! ([`Consumer::into_events`]), from a [`Position`] to a [`Bound`] or for ever, steered by a
//! [`ConsumerControl`].
//!
//! ```no_run
//! use futures::StreamExt;
//! use qute_client::{Bound, Position};
//!
//! # async fn example(client: qute_client::Client) -> qute_client::Result<()> {
//! let consumer = client
//!     .consumer("flights")
//!     .partitions([0, 1])
//!     .start_at(0, Position::Offset(1200))
//!     .until(Bound::End)
//!     .open()
//!     .await?;
//! let control = consumer.control();
//! control.pause([1])?;
//! let mut batches = consumer.into_batches();
//! while let Some(batch) = batches.next().await {
//!     println!("{} records; behind by {:?}", batch?.records.len(), control.lag());
//!     control.resume([1])?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Groups
//!
//! Members of a group share the partitions of topics; what they have acknowledged is committed
//! ([`Client::group`]). A function per record, with retries and dead letters: [`group::GroupConsumer::run`].
//! Lag, resets, commits without membership: [`Client::groups`].
//!
//! ```no_run
//! use futures::StreamExt;
//! use qute_client::group::Event;
//!
//! # async fn example(client: qute_client::Client) -> qute_client::Result<()> {
//! let mut group = client.group("billing").topics(["orders"]).join().await?;
//! while let Some(event) = group.next().await {
//!     match event {
//!         Event::Batch(batch) => {
//!             println!("{} records of {}", batch.records().len(), batch.topic_partition());
//!             batch.ack();
//!         }
//!         Event::Failed(error) => return Err(error),
//!         other => println!("{other:?}"),
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Administration
//!
//! ```no_run
//! use qute_client::{OffsetSpec, TopicChanges, TopicSpec};
//!
//! # async fn example(client: qute_client::Client) -> qute_client::Result<()> {
//! let spec = TopicSpec::new("flights").partitions(6).config("retention_ms", "86400000");
//! client.create_topic(spec).await?;
//! client.add_partitions("flights", 12).await?;
//! client.alter_topic("flights", TopicChanges::new().unset("retention_ms")).await?;
//! for broker in client.brokers().await? {
//!     println!("{} at {}: {}", broker.name, broker.address, broker.state);
//! }
//! let ends = client.list_offsets("flights", &[(0, OffsetSpec::End)]).await?;
//! println!("{ends:?}");
//! client.delete_topic("flights").await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Types in place of bytes
//!
//! A [`Codec`] makes bytes of values: [`Utf8Codec`], [`BytesCodec`], `JsonCodec` (feature `json`), or one
//! of the program's. A record that does not decode is an error item with the record inside, and the
//! stream goes on.
//!
//! ```no_run
//! use futures::StreamExt;
//! use qute_client::{ProducerConfig, Utf8Codec};
//!
//! # async fn example(client: qute_client::Client) -> qute_client::Result<()> {
//! let producer = client.producer(ProducerConfig::default())?;
//! let names = producer.typed("names", Utf8Codec).keys(Utf8Codec);
//! names.send(&"UA".to_owned(), &"United".to_owned()).await?;
//! names.send(&"TW".to_owned(), None).await?;
//!
//! let mut names = client.consumer("names").open().await?.typed(Utf8Codec).keys(Utf8Codec);
//! while let Some(name) = names.next().await {
//!     let name = name?;
//!     println!("{:?} is {:?}", name.key, name.value);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Hooks
//!
//! An [`Interceptor`] sees every record before it is sent, its fate, and every record that was read.
//! [`TraceContextLayer`] is one; [`DeadLetter`] sets records aside.
//!
//! ```no_run
//! use qute_client::{ConsumedRecord, HookError, Interceptor, ProducerConfig, Received, Record};
//! use qute_client::TraceContextLayer;
//!
//! /// Takes no record without a key.
//! struct Keyed;
//!
//! impl Interceptor for Keyed {
//!     fn before_send(&self, record: &mut Record) -> Result<(), HookError> {
//!         record.key.is_some().then_some(()).ok_or_else(|| "a record without a key".into())
//!     }
//!
//!     fn after_receive(&self, record: &mut ConsumedRecord) -> Result<Received, HookError> {
//!         let keyed = record.key.is_some();
//!         Ok(if keyed { Received::Deliver } else { Received::Skip })
//!     }
//! }
//!
//! # fn example(client: qute_client::Client) -> qute_client::Result<()> {
//! let config = ProducerConfig::default().interceptor(Keyed).interceptor(TraceContextLayer::new());
//! let producer = client.producer(config)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Spans and statistics
//!
//! `tracing` spans and events under stable names: [`trace`]. Counters for the program, and with the
//! feature `metrics` for the `metrics` facade (`docs/METRICS.md`):
//!
//! ```no_run
//! # fn example(client: qute_client::Client) {
//! let stats = client.stats();
//! println!("{} stored, acknowledged within {:?}", stats.records_acked, stats.ack_latency.p99);
//! # }
//! ```
//!
//! # Testing
//!
//! The crate `qute-test` runs a real cluster inside a test, with faults on demand (whole and compiled in
//! `docs/CLIENT.md`):
//!
//! ```text
//! let cluster = qute_test::Cluster::start(3).await?;
//! cluster.proxy(0)?.inject(Fault::drop_reply(Call::Produce).times(1));
//! let producer = cluster.client().await?.producer(ProducerConfig::default())?;
//! ```
//!
//! # Features and Rust
//!
//! | feature | brings |
//! | --- | --- |
//! | `json` | `JsonCodec`, by `serde` and `serde_json` |
//! | `metrics` | [`ClientStats`] in the `metrics` facade (0.24) |
//!
//! None is on by default. Rust 1.95 or later (`rust-version`).
//!
//! # Types
//!
//! Handles are `Send + Sync`, and cheap to clone unless they are streams or sinks. Foreign types in
//! public signatures are `bytes::Bytes` and the traits of `futures`; errors have none.

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
pub mod group;
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
#[path = "../tests/scripted/fake/mod.rs"]
mod fake;

pub use admin::{
    BrokerDescription, BrokerState, BrokerStatus, ClockReading, ClusterInfo, ListedOffset,
    OffsetQuery, OffsetSpec, PartitionDescription, ReplicaCounts, ReplicaDescription, ReplicaRole,
    StorageSpace, TopicChanges, TopicDescription, TopicSpec,
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
