//! Tests against real `qute-broker` and `qute` processes on loopback.
//!
//! | module | shows |
//! | --- | --- |
//! | `flights` | a real event stream through kills: nothing lost, doubled or reordered |
//! | `forming` | which brokers become a cluster, and which never do (S21) |
//! | `identity` | wiped, copied, foreign and newer data directories (S9, S23) |
//! | `restart` | stops, kills, freezes, changed ports |
//! | `input` | what people and networks send by mistake |
//! | `serve` | refusals and answers that clients build on: leaders, duplicates, credit, offsets |
//! | `disk` | a disk that is full |
//! | `coordinators` | coordinators of consumer groups: frozen, and sent nonsense |
//! | `wire` | (raw gRPC for `input`) |
//! | `client` | the client on bad days: brokers behind fault proxies |
//! | `groups` | consumer groups on bad days, against an oracle |
//! | `cost` | each record byte written once per replica |
//! | `scale` | a hundred partitions of three replicas |

mod client;
mod coordinators;
mod cost;
mod disk;
mod flights;
mod forming;
mod groups;
mod identity;
mod input;
mod restart;
mod scale;
mod serve;
mod wire;

use qute_tests::binaries::Binaries;

/// The programs under test.
fn bins() -> Binaries {
    qute_tests::binaries!()
}
