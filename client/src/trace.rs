//! Names of the client's `tracing` spans and events, stable across versions.
//!
//! All are at level `DEBUG` or finer (what needs a person is at `WARN` or `ERROR`), so that a program that does
//! not ask for them pays one check of a flag. `RUST_LOG=qute_client=debug` shows all of them,
//! `qute_client::produce=debug` those of one target.
//!
//! | target | span | from, to | fields |
//! | --- | --- | --- | --- |
//! | `qute_client::produce` | `batch` | a batch is sealed, its fate is decided | `topic`, `partition`, `records`, `bytes`, `attempt` (how many were needed), `offset` (of its first record, once acknowledged), `outcome` (`ok`, `not_written`, `unknown`) |
//! | `qute_client::metadata` | `refresh` | the view is asked for, answered or not | `cluster_index`, `error` |
//! | `qute_client::connection` | `connect` | a connection is attempted, made or not | `address`, `lane`, `error` |
//!
//! | target | event | fields |
//! | --- | --- | --- |
//! | `qute_client::produce` | `batch sent`, in span `batch` | `attempt` |
//! | `qute_client::produce` | `batch refused` | `topic`, `partition`, `code`, `cause` |
//! | `qute_client::fetch` | `batch received` (`TRACE`) | `topic`, `partition`, `offset`, `records`, `bytes` |
//! | `qute_client::fetch` | `subscription ended` | `topic`, `partition`, `error` |
//! | `qute_client::group` | `not answered by the coordinator` | `wanted`, `error` |
//! | `qute_client::group` | `handler failed` | `partition`, `offset`, `attempt`, `error` |
//! | `qute_client::group` | `dead letter not stored yet` | `partition`, `offset`, `error` |
//! | all of them | `... ended`, `... failed` | `address`, `cause` or `error` |
//!
//! Spans of the client are roots: a batch belongs to the many callers whose records it carries. What
//! ties a record to its caller's trace is its trace context, see [`crate::TraceContext`].

/// Target of what a producer does.
pub const PRODUCE: &str = "qute_client::produce";
/// Target of what a consumer does.
pub const FETCH: &str = "qute_client::fetch";
/// Target of the view of the cluster.
pub const METADATA: &str = "qute_client::metadata";
/// Target of connections.
pub const CONNECTION: &str = "qute_client::connection";
/// Target of consumer groups.
pub const GROUP: &str = "qute_client::group";
