//! The `__cluster` state machine and what acts on it.
