//! What the HTTP endpoints report of this broker: faults, what it waits for, gauges.

use qute_proto::ids::PartitionId;

use crate::controller::Controller;
use crate::controller::view::ClusterView;
use crate::groups::registry::partition_id;
use crate::groups::{Coordinators, GroupReplicas};
use crate::http;
use crate::partition::registry::{Hosted, Replicas};
use crate::raft::GroupHandle;
use crate::storage::Store;

/// What the HTTP endpoints report of this broker.
pub(super) struct Status {
    pub(super) store: Store,
    pub(super) replicas: Replicas,
    pub(super) group_replicas: GroupReplicas,
    pub(super) coordinators: Coordinators,
    pub(super) controller: Controller,
}

impl http::Status for Status {
    fn faults(&self) -> Vec<String> {
        let fatal = self.controller.watch_fatal().borrow().clone();
        fatal.into_iter().chain(self.controller.stopped()).collect()
    }

    fn waits(&self) -> Vec<String> {
        self.controller.waits()
    }

    fn refresh_gauges(&self) {
        let view = self.controller.view();
        let progress = self.controller.progress();
        let space = self.store.free_space();
        gauge("qute_replicas_open", &[], progress.open as u64);
        gauge("qute_replicas_desired", &[], progress.desired as u64);
        gauge(
            "qute_replicas_quarantined",
            &[],
            progress.quarantined.len() as u64,
        );
        gauge("qute_replicas_orphaned", &[], progress.orphans.len() as u64);
        gauge("qute_storage_available_bytes", &[], space.available_bytes);
        gauge("qute_storage_floor_bytes", &[], space.floor_bytes);
        gauge("qute_storage_cached_bytes", &[], self.store.cached_bytes());
        gauge("qute_cluster_index", &[], view.index);
        let totals = self.coordinators.totals();
        gauge("qute_groups_coordinated", &[], totals.groups as u64);
        gauge("qute_group_members", &[], totals.members as u64);
        gauge("qute_group_offsets", &[], totals.offsets as u64);
        gauge("qute_group_state_bytes", &[], totals.bytes as u64);
        let sessions = self.coordinators.sessions();
        gauge("qute_group_sessions", &[], sessions as u64);
        for (partition, hosted) in self.replicas.list() {
            let Hosted::Open(replica) = hosted else {
                continue;
            };
            let labels = labels(&view, partition);
            let bounds = replica.bounds();
            gauge(
                "qute_partition_high_watermark",
                &labels,
                bounds.high_watermark.0,
            );
            gauge(
                "qute_partition_log_start_offset",
                &labels,
                bounds.log_start.0,
            );
            group_gauges(replica.group(), &labels);
        }
        // `__groups` has commands and no records: no offsets to tell.
        for (number, hosted) in self.group_replicas.list() {
            if let Hosted::Open(replica) = hosted {
                let labels = labels(&view, partition_id(number));
                group_gauges(replica.group(), &labels);
            }
        }
    }
}

fn labels(view: &ClusterView, partition: PartitionId) -> [metrics::Label; 2] {
    let topic = view.topics_by_id.get(&partition.topic);
    let name = topic.map_or_else(|| partition.topic.to_string(), |topic| topic.name.clone());
    [
        metrics::Label::new("topic", name),
        metrics::Label::new("partition", partition.partition.to_string()),
    ]
}

/// What any replica has.
fn group_gauges(group: &GroupHandle, labels: &[metrics::Label]) {
    let stats = group.log().stats();
    gauge("qute_partition_size_bytes", labels, stats.size_bytes);
    gauge(
        "qute_partition_prewritten_bytes",
        labels,
        stats.prewritten_bytes,
    );
    let leads = u64::from(group.serving().is_some());
    gauge("qute_partition_leader", labels, leads);
    gauge("qute_partition_term", labels, group.leadership().term);
}

/// A gauge holds a float: exact up to 2^53, which is enough for offsets and bytes alike.
#[allow(clippy::cast_precision_loss)]
fn gauge(name: &'static str, labels: &[metrics::Label], value: u64) {
    metrics::gauge!(name, labels.to_vec()).set(value as f64);
}
