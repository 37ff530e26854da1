//! Consumer groups over whole brokers, through a raw gRPC client.

mod client;
mod coordinators;
mod members;
mod offsets;
