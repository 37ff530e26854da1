//! `qute cluster info|brokers`: one round over the brokers known, 3 s at most.

use qute_client::{Client, ClusterInfo};

use crate::args::{self, Global};
use crate::connection::{config_for, failure, nobody_answers};
use crate::exit::{Exit, Failure};
use crate::output::{self, Broker, Cluster};
use crate::progress::waiting;
use crate::target::Target;

/// Runs the command.
///
/// # Errors
/// Nobody answers, or (for `info`) the cluster is not complete.
pub async fn run(command: args::Cluster, global: &Global) -> Result<Exit, Failure> {
    // No view is waited for: a cluster that is still forming has none, and may be asked.
    let target = Target::resolve(global)?;
    let client = Client::lazy(config_for(&target, global)?).map_err(|error| failure(&error))?;
    let info = waiting("asking the brokers", client.cluster_info())
        .await
        .map_err(|error| nobody_answers(&error, &target))?;
    match command {
        args::Cluster::Info => {
            output::print(&described(&info), global.output)?;
            complete(&info)
        }
        args::Cluster::Brokers => {
            if !info.formed {
                return complete(&info);
            }
            output::print(&brokers(&info), global.output)
        }
    }
}

/// # Errors
/// What the cluster lacks.
fn complete(info: &ClusterInfo) -> Result<Exit, Failure> {
    if info.is_complete() {
        return Ok(Exit::Done);
    }
    let lacks = if !info.formed {
        "the cluster is not formed yet".to_owned()
    } else if info.controller.is_none() {
        "__cluster has no leader".to_owned()
    } else {
        format!(
            "{} of the {} founding brokers are registered",
            info.brokers.len(),
            info.founding_brokers
        )
    };
    Err(
        Failure::error(format!("{lacks} (says {})", info.answered_by))
            .hint("`/readyz` of each broker says what it waits for"),
    )
}

fn described(info: &ClusterInfo) -> Cluster {
    let controller = info
        .brokers
        .iter()
        .find(|broker| Some(broker.id) == info.controller);
    Cluster {
        cluster_id: info.cluster_id.map(|id| id.to_string()),
        formed: info.formed,
        controller: info.controller.map(|id| id.to_string()),
        controller_address: controller.map(|broker| broker.address.clone()),
        founding_brokers: info.founding_brokers,
        brokers: info.brokers.len(),
        brokers_alive: info
            .brokers
            .iter()
            .filter(|broker| broker.state == qute_client::BrokerState::Alive)
            .count(),
        topics: info.topics,
        partitions: info.partitions,
        faults: info.faults.clone(),
    }
}

fn brokers(info: &ClusterInfo) -> Vec<Broker> {
    let listed = |broker: &qute_client::BrokerDescription| Broker {
        id: broker.id.to_string(),
        name: broker.name.clone(),
        state: broker.state.to_string(),
        address: broker.address.clone(),
        rack: broker.rack.clone(),
    };
    info.brokers.iter().map(listed).collect()
}
