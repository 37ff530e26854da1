//! temp
mod call;
mod fault;
mod forward;
mod frames;
mod gate;
mod ledger;
mod meter;
pub mod ports;
mod proxy;
pub use call::Call;
pub use fault::{Fault, Injected, Refusal};
pub use proxy::Proxy;
