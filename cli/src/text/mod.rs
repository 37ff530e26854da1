//! The small languages of the command line, parsed and printed; no I/O.
//!
//! | module | language |
//! | --- | --- |
//! | [`duration`] | `5s`, `500ms`, `7d` |
//! | [`endpoint`] | `HOST:PORT` |
//! | [`escape`] | `\n \t \r \0 \\` |
//! | [`format`] | `-f`: how a record is printed |
//! | [`key_value`] | `K=V` |
//! | [`position`] | `-o`: where to start reading |

pub mod duration;
pub mod endpoint;
pub mod escape;
pub mod format;
pub mod key_value;
pub mod position;
