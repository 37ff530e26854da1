//! Tests against real processes on loopback.
