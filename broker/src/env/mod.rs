//! The outside world, one seam each: file system, clock.
