//! Tests of the layer as a whole: the library's conformance suite over the real store, and groups
//! of three replicas over real streams on loopback.

mod cluster;
mod commands;
mod conformance;
mod failures;
mod harness;
mod identity;
