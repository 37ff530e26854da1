//! Reads records: a stream over all or some partitions of a topic, in offset order per partition.
//!
//! ```text
//!  program:  ConsumerControl ---.
//!            Consumer <------- Buffer <------- Reader (task) <---- Link (task per broker)
//!                     takes     |      puts in                 batches |
//!                               '-- Pool: credit ----------------------'
//! ```
//!
//! | file | holds |
//! | --- | --- |
//! | `builder.rs` | what is to be read, from where, up to where |
//! | `stream.rs` | what the program reads from: records, batches, events |
//! | `event.rs` | what it is told besides records |
//! | `control.rs` | the handle beside the stream: pause, resume, seek, positions, lag |
//! | `buffer.rs` | what is fetched and not taken, and where each partition stands |
//! | `reader.rs`, `routing.rs`, `checks.rs` | the task: subscriptions; which replica; questions beside them |
//! | `trial.rs` | a follower that is asked while the leader serves on |
//! | `cursor.rs` | where reading of one partition stands; never skips, never doubles (pure) |
//! | `link.rs` | per broker, the fetch stream |
//! | `on_demand.rs` | a topic of which partitions are attached and detached: what groups read from |
//! | `credit.rs` | byte credit, of all links together (pure) |
//!
//! Memory: batches wait as they came in, compressed, bounded by the credit that brokers are given.
//! The credit counts them as they will be once decompressed. One batch at a time is decompressed,
//! when the program takes it. So a consumer holds at most the prefetch, 256 KiB and one message per
//! broker, and one decompressed batch (64 MiB at most), however many partitions it reads and however
//! well they are compressed.

mod buffer;
#[cfg(test)]
mod buffer_model;
mod builder;
mod checks;
mod control;
mod credit;
mod cursor;
mod event;
mod link;
mod on_demand;
mod reader;
mod routing;
mod stream;
mod trial;

pub use builder::{Bound, ConsumerBuilder, OutOfRange, Position};
pub use control::{Buffered, ConsumerControl};
pub(crate) use on_demand::{OnDemand, OnDemandPlan, Partitions, Prefetch};

pub use event::{ConsumedBatch, ConsumerEvent};
pub use stream::{BatchConsumer, Consumer, EventConsumer};
