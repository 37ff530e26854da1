//! How a broker comes to belong to a cluster (S21): founding one, or joining one.
//!
//! | file | holds |
//! | --- | --- |
//! | [`machine`] | the pure state machine: rounds, promises, what to do next |
//! | [`driver`] | probing, storing and calling |

pub mod driver;
pub mod machine;
