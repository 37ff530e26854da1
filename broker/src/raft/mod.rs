//! openraft adapters: log store, network, registry of groups.
