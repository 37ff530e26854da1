//! The examples are the programs beside this crate: `quickstart`, `producer`, `consumer`, and one
//! for each thing that the client can do besides. The crate itself compiles the code of the README and
//! of the cookbook as tests, and lends the examples a cluster to play with.

mod playground;

pub use playground::{Playground, unused};

/// The README; its Rust code is compiled by `cargo test`.
#[doc = include_str!("../../README.md")]
#[cfg(doctest)]
pub struct Readme;

/// The client's cookbook; its Rust code is compiled by `cargo test`.
#[doc = include_str!("../../docs/CLIENT.md")]
#[cfg(doctest)]
pub struct Cookbook;
