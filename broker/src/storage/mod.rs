//! Segment files, index, recovery, flusher, tail cache. Knows no Raft.
