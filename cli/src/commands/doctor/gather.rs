//! Asking: everything that the checks go by, from one look at the cluster.

use std::collections::BTreeSet;

use futures::future::join_all;
use qute_client::{BrokerId, BrokerStatus, Client, ClusterInfo, Error, TopicDescription};

/// What one address answered.
pub(super) struct Answer {
    /// The address that was asked.
    pub address: String,
    /// What came back.
    pub outcome: Result<BrokerStatus, Error>,
}

/// What was found.
pub(super) struct Findings {
    /// Of the addresses in the bootstrap list, in its order.
    pub bootstrap: Vec<Answer>,
    /// Of the addresses of registered brokers that are not in the bootstrap list.
    pub advertised: Vec<Answer>,
    /// The topics, those of the cluster itself too; `None` while there is no cluster to ask.
    pub topics: Option<Result<Vec<TopicDescription>, Error>>,
}

/// Looks. Takes about three seconds for each of its two rounds at most, and the call timeout for the
/// topics.
pub(super) async fn gather(client: &Client, bootstrap: &[String]) -> Findings {
    let mut findings = Findings {
        bootstrap: ask_all(client, bootstrap.iter().cloned()).await,
        advertised: Vec::new(),
        topics: None,
    };
    let Some(view) = findings.view() else {
        return findings;
    };
    let asked: BTreeSet<&String> = bootstrap.iter().collect();
    let brokers = view.brokers.iter().map(|broker| &broker.address);
    let others: BTreeSet<String> = brokers
        .filter(|address| !address.is_empty() && !asked.contains(address))
        .cloned()
        .collect();
    let formed = view.formed;
    findings.advertised = ask_all(client, others).await;
    if formed {
        findings.topics = Some(client.list_all_topics().await);
    }
    findings
}

async fn ask_all(client: &Client, addresses: impl IntoIterator<Item = String>) -> Vec<Answer> {
    let ask = |address: String| async move {
        let outcome = client.broker_status(&address).await;
        Answer { address, outcome }
    };
    join_all(addresses.into_iter().map(ask)).await
}

impl Findings {
    /// The newest view that any broker has.
    pub(super) fn view(&self) -> Option<&ClusterInfo> {
        let views = self.statuses().map(|status| &status.view);
        views.max_by_key(|view| (view.formed, view.cluster_index))
    }

    /// All answers.
    pub(super) fn answers(&self) -> impl Iterator<Item = &Answer> {
        self.bootstrap.iter().chain(&self.advertised)
    }

    fn statuses(&self) -> impl Iterator<Item = &BrokerStatus> {
        self.answers()
            .filter_map(|answer| answer.outcome.as_ref().ok())
    }

    /// One status of each broker that answered, by id: one may be reached by several addresses.
    pub(super) fn brokers(&self) -> Vec<&BrokerStatus> {
        let mut brokers: Vec<_> = self.statuses().collect();
        brokers.sort_by_key(|status| status.id);
        brokers.dedup_by_key(|status| status.id);
        brokers
    }

    /// The leader of `__cluster`, which counts only if it says so itself.
    pub(super) fn controller(&self) -> Option<BrokerId> {
        let says_so = |status: &&BrokerStatus| status.view.controller == Some(status.id);
        self.statuses().find(says_so).map(|status| status.id)
    }
}
