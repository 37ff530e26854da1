//! Each record byte is written once per replica.
