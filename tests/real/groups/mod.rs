//! Consumer groups on bad days: real brokers, members that are killed, frozen, cut off or restarted, and
//! an oracle (`qute_tests::oracle`) that holds what they saw against at-least-once.
//!
//! | module | shows |
//! | --- | --- |
//! | `crew`, `member`, `worker` | (members that put down what happens to them) |
//! | `writer` | (records to every partition meanwhile) |
//! | `moves` | members that join, die and come back: who has to move, and who never pauses |
//! | `freeze` | members and coordinators that stand still and wake up |
//! | `coordinator` | coordinators killed in the midst of commits, whole clusters, and whatever comes at random |
//! | `deposed` | two coordinators believed |
//! | `process` | `qute consume -g` killed, frozen and stopped |
//! | `refusals` | assignors without common ground, offsets out of range, limits |
//! | `topics` | topics made anew, partitions added |
//! | `offsets` | offsets that expire, are reset and deleted |
//! | `many` | many groups |

mod coordinator;
mod crew;
mod deposed;
mod freeze;
mod many;
mod member;
mod moves;
mod offsets;
mod process;
mod refusals;
mod topics;
mod worker;
mod writer;
