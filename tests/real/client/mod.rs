//! What the client promises (`ARCHITECTURE.md`, "The journey of one record"), on bad days: real
//! brokers, each behind a fault proxy of `qute-test`.
//!
//! | module | shows |
//! | --- | --- |
//! | `rig` | (brokers behind proxies, and what the tests check) |
//! | `leaders` | leaders that die mid-burst, lose their answers, or are missing |
//! | `hints` | wrong hints: the same epoch, two brokers naming each other, a broker that nobody knows |
//! | `topics` | partitions added, a topic made again |
//! | `outages` | brokers frozen, silent, moved, all down; closing then |
//! | `cancel` | every public future dropped after each number of polls |
//! | `memory` | a slow reader of what compresses well |

mod cancel;
mod hints;
mod leaders;
mod memory;
mod outages;
mod rig;
mod topics;
