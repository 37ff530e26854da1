//! Load generator and measurements for Qute.
//!
//! | module | holds |
//! | --- | --- |
//! | [`target`] | the cluster under load: one that runs, or brokers of its own |
//! | [`client`] | what the producer costs before the network, in time and allocations |
//! | [`load`] | `produce`, `consume`, `end-to-end`, by `qute-load` |
//! | [`failover`] | the gap after a leader is killed |
//! | [`frozen`] | what a frozen broker costs the others |
//! | [`restart`] | how soon a broker with many records serves again |
//! | [`idle`] | what replicas cost while nothing happens |
//! | [`groups`] | what consumer groups cost their coordinators |
//! | [`rebalance`] | how long a group takes to share its partitions out |
//! | [`disk`] | the ceiling that the disk sets, without Qute |
//!
//! Every measurement prints one JSON object to standard output and what it is doing to standard
//! error. Brokers of its own are real `qute-broker` processes, found beside this program.

pub mod client;
pub mod disk;
pub mod failover;
pub mod frozen;
pub mod groups;
pub mod idle;
pub mod load;
pub mod rebalance;
pub mod restart;
pub mod target;
