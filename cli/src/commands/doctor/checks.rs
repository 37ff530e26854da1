//! What follows from what was found. Pure; every check that does not pass says what to do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use indicatif::BinaryBytes;
use qute_client::{
    BrokerDescription, BrokerId, BrokerState, BrokerStatus, ClusterInfo, Error, ErrorKind,
    StorageSpace, TopicDescription,
};

use super::gather::{Answer, Findings};
use super::report::{Check, Status};
use crate::target::Target;

/// Brokers put up with clocks that are apart by this much (`max_clock_skew`).
const CLOCK_SKEW_MAX_MS: u64 = 5000;
/// Clocks that are kept are never so far apart.
const CLOCK_SKEW_DOUBTFUL_MS: u64 = 1000;
/// Of a disk, this part left is little.
const DISK_LITTLE: u64 = 10;
/// Partitions that are named, at most.
const NAMED_MAX: usize = 5;

/// Every check, in the order in which they are read.
pub(super) fn all(findings: &Findings, target: &Target) -> Vec<Check> {
    let mut checks = bootstrap(findings, target);
    let Some(view) = findings.view() else {
        return checks;
    };
    checks.push(cluster(findings, view));
    checks.extend(
        view.brokers
            .iter()
            .map(|broker| one_broker(findings, broker)),
    );
    let answered = findings.brokers();
    checks.extend(versions(&answered));
    checks.extend(clocks(&answered));
    for status in &answered {
        checks.extend(disk(status));
        checks.extend(replicas(status));
    }
    if let Some(topics) = &findings.topics {
        checks.extend(partitions(topics, view, &answered));
    }
    let faults = answered.iter().flat_map(|status| {
        let fault = |fault: &String| {
            let advice =
                "the log of that broker says more; docs/OPERATIONS.md says what can be done";
            fail("fault", &named(status), fault.clone(), advice)
        };
        status.faults.iter().map(fault)
    });
    checks.extend(faults);
    checks
}

fn ok(check: &'static str, subject: &str, message: impl Into<String>) -> Check {
    Check {
        check,
        subject: subject.to_owned(),
        status: Status::Ok,
        message: message.into(),
        advice: None,
    }
}

fn warn(
    check: &'static str,
    subject: &str,
    message: impl Into<String>,
    advice: impl Into<String>,
) -> Check {
    Check {
        status: Status::Warn,
        advice: Some(advice.into()),
        ..ok(check, subject, message)
    }
}

fn fail(
    check: &'static str,
    subject: &str,
    message: impl Into<String>,
    advice: impl Into<String>,
) -> Check {
    Check {
        status: Status::Fail,
        ..warn(check, subject, message, advice)
    }
}

/// The name of a broker, or its id where it has none.
fn named(status: &BrokerStatus) -> String {
    label(&status.name, status.id)
}

fn label(name: &str, id: BrokerId) -> String {
    match name {
        "" => format!("broker {id}"),
        name => name.to_owned(),
    }
}

fn cause(error: &Error) -> String {
    match error.endpoints() {
        [one] => one.cause.clone(),
        _ => error.message().to_owned(),
    }
}

fn bootstrap(findings: &Findings, target: &Target) -> Vec<Check> {
    let nobody = findings
        .bootstrap
        .iter()
        .all(|answer| answer.outcome.is_err());
    let check = |answer: &Answer| match &answer.outcome {
        Ok(status) => {
            let took = status.round_trip.as_secs_f64() * 1000.0;
            ok(
                "bootstrap",
                &answer.address,
                format!("{} answers in {took:.1} ms", named(status)),
            )
        }
        Err(error) if error.kind() == ErrorKind::WrongCluster => fail(
            "bootstrap",
            &answer.address,
            cause(error),
            format!(
                "name brokers of one cluster only: the list comes from {}",
                target.source
            ),
        ),
        Err(error) if nobody => fail("bootstrap", &answer.address, cause(error), target.advice()),
        Err(error) => warn(
            "bootstrap",
            &answer.address,
            cause(error),
            format!(
                "start the broker there, or take the address out of the list (from {})",
                target.source
            ),
        ),
    };
    findings.bootstrap.iter().map(check).collect()
}

fn cluster(findings: &Findings, view: &ClusterInfo) -> Check {
    let id = view
        .cluster_id
        .map_or_else(|| "-".to_owned(), |id| id.to_string());
    let missing = usize::try_from(view.founding_brokers.max(1))
        .unwrap_or(usize::MAX)
        .saturating_sub(view.brokers.len());
    if !view.formed {
        return fail(
            "cluster",
            &id,
            "it is not formed yet",
            "start the founding brokers; `/readyz` of each says what it waits for",
        );
    }
    let Some(controller) = findings.controller() else {
        return fail(
            "cluster",
            &id,
            "__cluster has no leader that could be reached: topics and groups can't be changed",
            "start brokers until most of the founding ones run; `/readyz` of each says what it waits for",
        );
    };
    if missing > 0 {
        return fail(
            "cluster",
            &id,
            format!("{missing} founding brokers have not registered themselves yet"),
            "start them; `/readyz` of each says what it waits for",
        );
    }
    let led = view.brokers.iter().find(|broker| broker.id == controller);
    let led = led.map_or_else(
        || format!("broker {controller}"),
        |broker| label(&broker.name, broker.id),
    );
    ok(
        "cluster",
        &id,
        format!(
            "led by {led}; {} brokers, {} topics, {} partitions",
            view.brokers.len(),
            view.topics,
            view.partitions
        ),
    )
}

/// A registered broker: what the others think of it, and whether it can be reached from here where
/// it says that clients reach it.
fn one_broker(findings: &Findings, broker: &BrokerDescription) -> Check {
    let name = label(&broker.name, broker.id);
    let at = &broker.address;
    match broker.state {
        BrokerState::Dead => {
            return fail(
                "broker",
                &name,
                format!("the others have given it up (it was at {at})"),
                "start it with the data directory that it had; its log says why it went",
            );
        }
        BrokerState::Suspect => {
            return warn(
                "broker",
                &name,
                format!("it misses probes of the others (at {at})"),
                "look whether it is overloaded, or its UDP traffic (gossip) is lost",
            );
        }
        BrokerState::Alive | BrokerState::Draining | BrokerState::Unknown => {}
    }
    let asked = findings.answers().find(|answer| answer.address == *at);
    let unreachable = |cause: String| {
        fail(
            "broker",
            &name,
            format!("the others see it, but clients here can't reach {at}: {cause}"),
            "its `advertise` address has to be one that clients reach: look at that setting, at the name \
             service and at firewalls in between",
        )
    };
    match asked.map(|answer| &answer.outcome) {
        None => unreachable("it has no address".to_owned()),
        Some(Err(error)) => unreachable(cause(error)),
        Some(Ok(status)) if status.id != broker.id => fail(
            "broker",
            &name,
            format!(
                "{} (id {}) answers at its address {at}",
                named(status),
                status.id
            ),
            "give each broker an `advertise` address of its own, then restart it",
        ),
        Some(Ok(_))
            if is_loopback(at)
                && !findings
                    .bootstrap
                    .iter()
                    .any(|answer| is_loopback(&answer.address)) =>
        {
            warn(
                "broker",
                &name,
                format!("its address {at} leads every client to the client's own machine"),
                "set `advertise` to an address that other machines reach",
            )
        }
        Some(Ok(_)) if broker.state == BrokerState::Draining => warn(
            "broker",
            &name,
            format!("it is being emptied (at {at})"),
            "wait until that is done",
        ),
        Some(Ok(_)) => ok("broker", &name, format!("alive, reached at {at}")),
    }
}

fn is_loopback(address: &str) -> bool {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn versions(answered: &[&BrokerStatus]) -> Option<Check> {
    let own = env!("CARGO_PKG_VERSION");
    let mut by_version: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for status in answered {
        by_version
            .entry(&status.version)
            .or_default()
            .push(named(status));
    }
    let first = *by_version.first_key_value()?.0;
    if by_version.len() > 1 {
        let told = by_version
            .iter()
            .map(|(version, names)| format!("{} at {version}", names.join(", ")));
        return Some(warn(
            "version",
            "brokers",
            format!("they differ: {}", told.collect::<Vec<_>>().join("; ")),
            "finish the upgrade: bring all brokers to one version, one after the other",
        ));
    }
    Some(match first == own {
        true => ok(
            "version",
            "brokers",
            format!("{own} everywhere, as this program"),
        ),
        false => warn(
            "version",
            "this program",
            format!("it is {own}, the brokers are {first}"),
            "use the program that goes with the brokers",
        ),
    })
}

/// Each broker's clock against this machine's, and the brokers' against each other.
fn clocks(answered: &[&BrokerStatus]) -> Vec<Check> {
    let set = "set both clocks by NTP: records are stamped, found by time and kept by these clocks";
    let mut checks = Vec::new();
    let mut readings = Vec::new();
    for status in answered {
        let Some(clock) = status.clock else {
            checks.push(warn(
                "clock",
                &named(status),
                "it does not tell its time",
                "its version is too old for that: bring it up to date",
            ));
            continue;
        };
        readings.push(clock);
        let certain = clock.ahead_ms.unsigned_abs().saturating_sub(clock.error_ms);
        let direction = if clock.ahead_ms < 0 {
            "behind"
        } else {
            "ahead of"
        };
        let apart = format!(
            "{} ms {direction} this machine (give or take {} ms)",
            clock.ahead_ms.unsigned_abs(),
            clock.error_ms
        );
        checks.push(judged("clock", &named(status), certain, apart, set));
    }
    let ahead = readings.iter().map(|clock| clock.ahead_ms);
    if let (Some(least), Some(most), 2..) = (ahead.clone().min(), ahead.max(), readings.len()) {
        let error = readings
            .iter()
            .map(|clock| clock.error_ms)
            .max()
            .unwrap_or(0);
        let apart = most.abs_diff(least);
        checks.push(judged(
            "clock",
            "brokers",
            apart.saturating_sub(error.saturating_mul(2)),
            format!("at most {apart} ms apart from each other"),
            set,
        ));
    }
    checks
}

fn judged(
    check: &'static str,
    subject: &str,
    apart_ms: u64,
    message: String,
    advice: &str,
) -> Check {
    match apart_ms {
        CLOCK_SKEW_MAX_MS.. => fail(check, subject, message, advice),
        CLOCK_SKEW_DOUBTFUL_MS.. => warn(check, subject, message, advice),
        _ => ok(check, subject, message),
    }
}

fn disk(status: &BrokerStatus) -> Option<Check> {
    let name = named(status);
    let space = status.storage?;
    let StorageSpace {
        total_bytes,
        available_bytes,
        floor_bytes,
    } = space;
    let told = format!(
        "{} free of {}, {} kept back",
        BinaryBytes(available_bytes),
        BinaryBytes(total_bytes),
        BinaryBytes(floor_bytes)
    );
    let advice = "delete topics, shorten retention or give the disk more space";
    Some(if available_bytes <= floor_bytes {
        fail(
            "disk",
            &name,
            format!("full, records are refused: {told}"),
            advice,
        )
    } else if available_bytes - floor_bytes < floor_bytes
        || available_bytes < total_bytes / DISK_LITTLE
    {
        warn("disk", &name, format!("little space left: {told}"), advice)
    } else {
        ok("disk", &name, told)
    })
}

fn replicas(status: &BrokerStatus) -> Option<Check> {
    let name = named(status);
    let counts = status.replicas?;
    let told = format!(
        "{} of {} open, {} led here",
        counts.open, counts.desired, counts.leading
    );
    Some(if counts.quarantined > 0 {
        fail(
            "replicas",
            &name,
            format!("{} are damaged and not served; {told}", counts.quarantined),
            "keep the directories, the other replicas serve; docs/OPERATIONS.md says what else can be done",
        )
    } else if counts.open < counts.desired {
        warn(
            "replicas",
            &name,
            format!("some are not open: {told}"),
            "wait if it has just started; else its log says why",
        )
    } else if counts.orphaned > 0 {
        warn(
            "replicas",
            &name,
            format!(
                "{} directories belong to no replica of this cluster; {told}",
                counts.orphaned
            ),
            "they are kept; look at them before you remove them by hand",
        )
    } else {
        ok("replicas", &name, told)
    })
}

fn partitions(
    topics: &Result<Vec<TopicDescription>, Error>,
    view: &ClusterInfo,
    answered: &[&BrokerStatus],
) -> Vec<Check> {
    let topics = match topics {
        Ok(topics) => topics,
        Err(error) => {
            return vec![fail(
                "partitions",
                "all",
                format!("they could not be listed: {error}"),
                "see the checks above; --timeout allows more time",
            )];
        }
    };
    let lost: BTreeSet<BrokerId> = view
        .brokers
        .iter()
        .filter(|broker| broker.state == BrokerState::Dead)
        .map(|broker| broker.id)
        .collect();
    let known: BTreeSet<BrokerId> = view.brokers.iter().map(|broker| broker.id).collect();
    let is_lost = |broker: &BrokerId| lost.contains(broker) || !known.contains(broker);
    let (mut leaderless, mut short, mut total) = (Vec::new(), Vec::new(), 0usize);
    for topic in topics {
        for partition in &topic.partitions {
            total += 1;
            let name = format!("{}/{}", topic.name, partition.partition);
            let replicas = &partition.replicas;
            let gone = replicas
                .iter()
                .filter(|replica| is_lost(&replica.broker))
                .count();
            if partition.leader.is_none_or(|leader| is_lost(&leader)) {
                leaderless.push(name);
            } else if gone > 0 {
                short.push(name);
            }
        }
    }
    let lagging: u32 = answered
        .iter()
        .filter_map(|status| status.replicas)
        .map(|counts| counts.under_replicated)
        .sum();
    let mut checks = Vec::new();
    if !leaderless.is_empty() {
        checks.push(fail(
            "partitions",
            &listed(&leaderless),
            "no leader: nothing can be written or read there",
            "start the brokers that hold most of their replicas (`qute topic describe` names them)",
        ));
    }
    if !short.is_empty() {
        checks.push(warn(
            "partitions",
            &listed(&short),
            "fewer live replicas than placed: another loss may stop them",
            "start the brokers that are dead",
        ));
    }
    if lagging > 0 && short.is_empty() && leaderless.is_empty() {
        checks.push(warn(
            "partitions",
            &format!("{lagging} partitions"),
            "a replica does not answer its leader",
            "wait if a broker has just started; else look at the brokers and the network between them",
        ));
    }
    if checks.is_empty() {
        checks.push(ok(
            "partitions",
            "all",
            format!("all {total} have a leader and their replicas"),
        ));
    }
    checks
}

/// The first few, and how many more.
fn listed(names: &[String]) -> String {
    let shown = names
        .iter()
        .take(NAMED_MAX)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match names.len().saturating_sub(NAMED_MAX) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
#[path = "checks_tests.rs"]
mod tests;
