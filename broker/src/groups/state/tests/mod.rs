//! The rules, one by one, and all of them together over random commands.

mod checkpoint;
mod claims;
mod fixture;
mod measures;
mod membership;
mod offsets;
mod properties;
