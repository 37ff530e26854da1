//! Reaching the cluster, and what the client's errors mean at a terminal: exit code and hint.

use std::time::Duration;

use qute_client::{Client, ClientConfig, Error, ErrorKind};

use crate::args::Global;
use crate::exit::{Exit, Failure};
use crate::progress::waiting;
use crate::suggest;
use crate::target::Target;

/// How long a failed command may look for the name that was meant.
const SUGGESTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The client's settings that the global flags ask for.
///
/// # Errors
/// As [`Target::resolve`].
pub fn config(global: &Global) -> Result<ClientConfig, Failure> {
    config_for(&Target::resolve(global)?, global)
}

/// The same for these brokers.
///
/// # Errors
/// The bootstrap list makes no sense.
pub fn config_for(target: &Target, global: &Global) -> Result<ClientConfig, Failure> {
    let list = target.bootstrap.addresses().join(",");
    let config = ClientConfig::new(&list).map_err(|error| failure(&error))?;
    let timeout = global.admin_timeout();
    Ok(config
        .client_name(concat!("qute ", env!("CARGO_PKG_VERSION")))
        .connect_timeout(timeout.min(Duration::from_secs(3)))
        .call_timeout(timeout))
}

/// Connects.
///
/// # Errors
/// No broker of the bootstrap list answers; each is named.
pub async fn connect(global: &Global) -> Result<Client, Failure> {
    connect_to(global).await.map(|(_, client)| client)
}

/// The same, with whom it connected to.
///
/// # Errors
/// As [`connect`].
pub async fn connect_to(global: &Global) -> Result<(Target, Client), Failure> {
    let target = Target::resolve(global)?;
    let connecting = Client::connect_with(config_for(&target, global)?);
    let whom = target.bootstrap.addresses().join(", ");
    match waiting(format!("connecting to {whom}"), connecting).await {
        Ok(client) => Ok((target, client)),
        Err(error) => Err(nobody_answers(&error, &target)),
    }
}

/// How the failure to reach anybody ends a command: every endpoint is named, also those that
/// just kept silent. Refused at once is exit 1, a deadline that passed is 3.
#[must_use]
pub fn nobody_answers(error: &Error, target: &Target) -> Failure {
    let mut told = failure(error);
    if error.kind() == ErrorKind::Unreachable {
        told.exit = Exit::Error;
    }
    if matches!(error.kind(), ErrorKind::Unreachable | ErrorKind::Timeout) {
        told.hint = Some(target.advice());
        let unnamed = |endpoint: &&String| {
            let failures = error.endpoints();
            failures
                .iter()
                .all(|failure| failure.endpoint != **endpoint)
        };
        let silent: Vec<&str> = target
            .bootstrap
            .addresses()
            .iter()
            .filter(unnamed)
            .map(String::as_str)
            .collect();
        if !silent.is_empty() {
            told.message = format!("{}; no answer from {}", told.message, silent.join(", "));
        }
    }
    told
}

/// How a client's error ends a command.
#[must_use]
pub fn failure(error: &Error) -> Failure {
    Failure {
        exit: exit_of(error),
        message: error.to_string(),
        hint: hint_of(error),
    }
}

/// How a client's error ends a command that had connected: as [`failure`], and a topic that does
/// not exist is answered with the one that may have been meant.
///
/// # Cancel safety
/// Nothing is lost: it only reads.
pub async fn explain(client: &Client, error: &Error) -> Failure {
    let mut told = failure(error);
    if error.kind() != ErrorKind::UnknownTopic {
        return told;
    }
    let Some(name) = error.topic() else {
        return told;
    };
    told.message = format!("topic '{name}' does not exist");
    let listed = tokio::time::timeout(SUGGESTION_TIMEOUT, client.list_topics()).await;
    // Without the list the hint has to do.
    let Ok(Ok(topics)) = listed else {
        return told;
    };
    let names = topics.iter().map(|topic| topic.name.as_str());
    if let Some(question) = suggest::did_you_mean(name, names) {
        let hint = format!("{question} `qute topic list` shows what there is");
        told.hint = Some(hint);
    }
    told
}

/// The client retries until the deadline whatever a retry can help, so such an error means that
/// the deadline has passed.
fn exit_of(error: &Error) -> Exit {
    match error.kind() {
        ErrorKind::Config => Exit::Usage,
        ErrorKind::NotEnoughBrokers | ErrorKind::ReplicaQuarantined => Exit::Error,
        _ if error.is_retriable() => Exit::Timeout,
        _ => Exit::Error,
    }
}

fn hint_of(error: &Error) -> Option<String> {
    let topic = error.topic().unwrap_or("NAME");
    Some(match error.kind() {
        ErrorKind::Unreachable => {
            "`qute doctor` says which brokers can be reached from here".to_owned()
        }
        ErrorKind::Timeout | ErrorKind::NoLeader | ErrorKind::NotReady => {
            "`qute cluster info` and `qute cluster brokers` show who is missing; \
             --timeout allows more time"
                .to_owned()
        }
        ErrorKind::UnknownTopic => {
            format!("`qute topic list` shows what there is, `qute topic create {topic}` makes it")
        }
        ErrorKind::UnknownPartition => {
            format!("`qute topic describe {topic}` shows the partitions, numbered from 0")
        }
        ErrorKind::TopicExists => format!("`qute topic describe {topic}` shows it"),
        ErrorKind::NotEnoughBrokers => "start more brokers or ask for fewer --replicas".to_owned(),
        ErrorKind::RecordTooLarge => "split it, or send a reference to it".to_owned(),
        ErrorKind::StorageFull => {
            "free space on the disks of the brokers, or delete topics".to_owned()
        }
        ErrorKind::ReplicaQuarantined => "the log of that broker says what is damaged".to_owned(),
        ErrorKind::Overloaded => "try again with less at once".to_owned(),
        ErrorKind::WrongCluster => {
            "the bootstrap list names brokers of different clusters: name one cluster's with -b"
                .to_owned()
        }
        ErrorKind::CorruptBatch => "`qute consume` with -p and -o reads on behind it".to_owned(),
        ErrorKind::Internal => "the log of that broker says more".to_owned(),
        ErrorKind::Config | ErrorKind::InvalidArgument => {
            "correct the value; --help says what is accepted".to_owned()
        }
        ErrorKind::InvalidTopicName | ErrorKind::InvalidGroupName => {
            "choose another name".to_owned()
        }
        ErrorKind::BatchTooLarge => "send smaller records".to_owned(),
        ErrorKind::OffsetOutOfRange => {
            "begin at start or end, or at an offset that is still there".to_owned()
        }
        ErrorKind::TopicRecreated => {
            "the topic was deleted and made again: look at it and begin anew".to_owned()
        }
        ErrorKind::OutcomeUnknown | ErrorKind::ProducerReset => {
            "look whether it was written before you write it again".to_owned()
        }
        ErrorKind::Protocol => {
            "program and brokers may be of different versions: `qute doctor` says so".to_owned()
        }
        ErrorKind::UnknownGroup => "`qute group list` shows what there is".to_owned(),
        ErrorKind::UnknownMember | ErrorKind::ClaimFenced | ErrorKind::StaleGeneration => {
            "another member has taken over meanwhile: run the command again to join anew".to_owned()
        }
        ErrorKind::InconsistentAssignor => {
            "let all members of the group run the same version".to_owned()
        }
        ErrorKind::GroupNotEmpty => {
            "`qute group describe` shows its members: stop them first".to_owned()
        }
        ErrorKind::GroupLimit => {
            "delete groups that nobody needs, or raise the brokers' limits".to_owned()
        }
        ErrorKind::OffsetBehind => {
            "committed offsets go back by `qute group reset` only".to_owned()
        }
        _ => return None,
    })
}
