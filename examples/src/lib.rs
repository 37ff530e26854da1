//! The examples are the programs beside this crate: `quickstart`, `producer`, `consumer`. The crate
//! itself compiles the code of the README as a test.

/// The README; its Rust code is compiled by `cargo test`.
#[doc = include_str!("../../README.md")]
#[cfg(doctest)]
pub struct Readme;
