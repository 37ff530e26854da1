//! The HTTP side: metrics and health.
