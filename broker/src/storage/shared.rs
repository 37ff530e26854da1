//! What all logs of a data directory share.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use super::background::Background;
use super::cache::TailBudget;
use super::error::Error;
use super::files::FileCache;
use super::flusher::Queue;
use super::meta::MetaFile;
use super::meta_record::{MetaRecord, MetaState};
use super::space::SpaceAccount;
use super::types::ReplicaKey;
use crate::env::Fs;

/// See the module's documentation.
pub(super) struct Shared {
    pub fs: Arc<dyn Fs>,
    pub dir: PathBuf,
    pub queue: Arc<Queue>,
    pub background: Background,
    pub files: FileCache,
    pub budget: TailBudget,
    pub space: Arc<SpaceAccount>,
    /// The sum of what is written to the meta log. Changed by the flusher.
    pub meta: Mutex<MetaState>,
    /// Written by the flusher only.
    pub meta_file: Mutex<MetaFile>,
    /// S4: replicas that failed in this process, and why.
    pub poisoned: Mutex<HashMap<ReplicaKey, String>>,
}

impl Shared {
    /// Writes records to the meta log (flusher only).
    pub(super) fn meta_write(&self, records: &[MetaRecord], sync: bool) -> Result<(), Error> {
        if records.is_empty() {
            return Ok(());
        }
        let mut file = self.meta_file.lock();
        file.write(records)?;
        if sync {
            file.sync()?;
            metrics::counter!("qute_storage_meta_syncs_total").increment(1);
        }
        let mut state = self.meta.lock();
        for record in records {
            state.apply(record);
        }
        if file.wants_compaction() {
            let state = state.clone();
            file.compact(&state)?;
        }
        Ok(())
    }
}
