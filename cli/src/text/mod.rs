//! The small languages of the command line, parsed and printed; no I/O.
//!
//! | module | language |
//! | --- | --- |
//! | [`duration`] | `5s`, `500ms`, `7d` |
//! | [`escape`] | `\n \t \r \0 \\` |
//! | [`format`] | `-f`: how a record is printed |
//! | [`json_series`] | objects that come one by one, as JSON |
//! | [`key_value`] | `K=V` |
//! | [`offsets_file`] | `group reset --from-file` |
//! | [`position`] | `-o`: where to start reading |
//! | [`rate`] | `--rate`: records a second |
//! | [`record_json`] | a record as JSON |
//! | [`reset_target`] | `group reset --to` |

pub mod duration;
pub mod escape;
pub mod format;
pub mod json_series;
pub mod key_value;
pub mod offsets_file;
pub mod position;
pub mod rate;
pub mod record_json;
pub mod reset_target;
