//! The test kit of Qute: a real cluster inside a test, and faults on demand.
//!
//! A program that uses `qute-client` is right when it is right on a bad day: a leader dies between
//! the write and its acknowledgement, a broker says "not me" and points at the wrong one, a network
//! swallows everything and says nothing. This crate makes such days in a unit test, in milliseconds
//! and on purpose.
//!
//! ```
//! use qute_client::{ProducerConfig, Record};
//! use qute_test::{Call, Cluster, Fault};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let cluster = Cluster::start(1).await?;
//! cluster.create_topic("orders", 1).await?;
//!
//! // The broker writes the record, and its acknowledgement gets lost on the way.
//! let lost = cluster.proxy(0)?.inject(Fault::drop_reply(Call::Produce).times(1));
//!
//! let producer = cluster.client().await?.producer(ProducerConfig::default())?;
//! let first = producer.send(Record::to("orders").key("a").value("1")).await?;
//! let second = producer.send(Record::to("orders").key("a").value("2")).await?;
//!
//! // The client sent the record again, and the broker knew it: one record, its first offset.
//! assert_eq!(lost.hits(), 1);
//! assert_eq!((first.offset, second.offset), (0, 1));
//! # cluster.stop().await;
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! # What there is
//!
//! | item | what for |
//! | --- | --- |
//! | [`Cluster`] | brokers in the test's process, in temporary directories: [`kill`](Cluster::kill) one, [`restart`](Cluster::restart) it, ask who [leads](Cluster::leader_of), [slow the leader down](Cluster::delay_leader) |
//! | [`Proxy`] | a broker's address for clients, gRPC-aware; one before each broker of a [`Cluster`], or by hand before any broker |
//! | [`Fault`] | what to do with messages: [drop a reply](Fault::drop_reply), [a request](Fault::drop_request), [refuse](Fault::refuse) with a hint of your choice, [delay](Fault::delay), [change a view of the cluster](Fault::edit_metadata) |
//! | [`Injected`] | a fault at work: how often it has hit; stop it |
//! | [`Port`](ports::Port) | a port of loopback that no other test takes |
//!
//! # A leader dies
//!
//! ```
//! # use qute_client::{ProducerConfig, Record};
//! # use qute_test::Cluster;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let mut cluster = Cluster::start(3).await?;
//! cluster.create_topic("orders", 1).await?;
//! let producer = cluster.client().await?.producer(ProducerConfig::default())?;
//! producer.send(Record::to("orders").value("before")).await?;
//!
//! let leader = cluster.leader_of("orders", 0).await?;
//! cluster.kill(leader).await?;
//!
//! let written = producer.send(Record::to("orders").value("after")).await?;
//! assert_eq!(written.offset, 1);
//! assert_ne!(cluster.leader_of("orders", 0).await?, leader);
//! # cluster.stop().await;
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! # What is not faked
//!
//! Brokers are the real ones, with their real logs on disk; the clock is the real one. So tests
//! should wait for conditions, not for times. [`Cluster::kill`] ends a broker as others would see
//! a crash, but it is no power cut: the process lives on, and so does what the kernel holds.

#![warn(missing_docs)]

mod call;
mod cluster;
mod error;
mod fault;
mod forward;
mod frames;
mod gate;
mod ledger;
mod meter;
pub mod ports;
mod proxy;

pub use call::Call;
pub use cluster::Cluster;
pub use error::Error;
pub use fault::{Fault, Injected, Refusal};
pub use proxy::Proxy;
/// Settings of an embedded broker ([`Cluster::start_with`]).
pub use qute_broker::config::Config as BrokerConfig;
/// Messages as they go over the wire, for [`Fault::edit_reply`] and [`Refusal::wire`].
pub use qute_proto::v1 as wire;
