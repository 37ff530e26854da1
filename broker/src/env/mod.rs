//! The outside world, one seam each: file system and clock.
//!
//! Production code reaches files only through [`Fs`] and [`File`], so that the very same code
//! runs on [`RealFs`] and on [`SimFs`], which loses unsynced data, tears writes and fails on
//! demand. Nothing here knows what is stored.

mod clock;
mod fs;
mod real;
mod sim;

pub use clock::{Clock, ManualClock, SystemClock};
pub use fs::{
    DirEntry, File, Fs, LockGuard, Space, read_all, read_exact_at, remove_if_there,
    write_atomically,
};
pub use real::RealFs;
pub use sim::{Fault, FaultOp, SimFs};
