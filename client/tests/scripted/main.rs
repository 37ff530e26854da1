//! The client against a scripted broker (`fake/`): real gRPC on loopback, and a script that says what
//! goes wrong. One program, since each costs its link; what needs a process of its own stands beside it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "test code"
)]

mod admin;
mod consumer;
mod fake;
mod group;
mod group_admin;
mod group_handler;
mod handles;
mod hooks;
mod producer;
mod producer_cancel;
mod producer_limits;
mod producer_topics;
mod routing;
mod typed;
