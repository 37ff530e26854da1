//! The cluster harness: real `qute-broker` and `qute` processes on loopback.
//!
//! | module | holds |
//! | --- | --- |
//! | [`binaries`] | where the programs under test are |
//! | [`ports`] | ports that no other test holds |
//! | [`wait`] | waiting for a condition, never for a time |
//! | [`process`] | one broker process: start, kill, pause, stop, its log |
//! | [`cluster`] | several of them with their data directories |
//! | [`command`] | running `qute` with a deadline |
//! | [`http`] | `GET` against a broker's HTTP port, and its metrics as numbers |
//! | [`fleet`] | many groups at once |
//! | [`member`] | a member of a consumer group in raw gRPC |
//! | [`oracle`] | what members of a group saw, held against what they were promised |
//! | [`peernet`] | the network between brokers, with cuts |
//! | [`flights`] | the flights data, its published table, and the checks against both |
//! | `documents` | the test that files named in documents exist |
//! | `layers` | the test that keeps the layers of `broker/src` |
//! | [`procfs`] | what the kernel says about a process and its files |
//!
//! Every process is stopped by its id when its handle is dropped, whatever the test's fate, and
//! the end of each broker's log is printed unless the test ended with [`cluster::Cluster::stop`].
//! Functions return errors instead of panicking, so that the log comes with the reason.

pub mod binaries;
pub mod cluster;
pub mod command;
#[cfg(test)]
mod documents;
pub mod fleet;
pub mod flights;
pub mod http;
#[cfg(test)]
mod layers;
pub mod member;
pub mod oracle;
pub mod peernet;
pub mod process;
pub mod procfs;
pub mod wait;

pub use qute_test::ports;
