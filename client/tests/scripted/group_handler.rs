//! Handlers: order, retries, dead letters, stopping, and partitions that are taken away meanwhile.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use qute_client::group::{CommitMode, GroupConsumer, GroupEvent, RunPolicy, RunReport};
use qute_client::{
    Client, ConsumedRecord, DeadLetter, ErrorKind, Producer, ProducerConfig, Record, Result,
    TopicSpec,
};
use qute_proto::v1::ErrorCode;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::task::JoinHandle;

use crate::fake::{Fake, Produce, TOPIC, error};

const DEAD: &str = "dead";
const GROUP: &str = "g";

/// Values by partition, in the log.
async fn fake(partitions: &[&[&str]]) -> (Fake, Client) {
    let fake = Fake::start(1, partitions.len()).await;
    let client = fake.client().await;
    client.create_topic(TopicSpec::new(DEAD)).await.unwrap();
    let producer = client.producer(ProducerConfig::default()).unwrap();
    for (partition, values) in (0..).zip(partitions) {
        for value in *values {
            let record = Record::to(TOPIC)
                .partition(partition)
                .value(value.to_string());
            producer.send(record).await.unwrap();
        }
    }
    (fake, client)
}

fn text(record: &ConsumedRecord) -> String {
    String::from_utf8(record.value.clone().unwrap().to_vec()).unwrap()
}

async fn join(client: &Client) -> GroupConsumer {
    let interval = Duration::from_millis(20);
    let group = client.group(GROUP).topics([TOPIC]);
    let group = group.commit(CommitMode::every(interval));
    group.join().await.unwrap()
}

/// Fast, with dead letters.
fn policy(client: &Client) -> (RunPolicy, Producer) {
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let policy = impatient().dead_letters(DeadLetter::to(DEAD), producer.clone());
    (policy, producer)
}

fn impatient() -> RunPolicy {
    let shortest = Duration::from_millis(1);
    RunPolicy::default().attempts(3).backoff(shortest, shortest)
}

/// A run in a task, what it has seen by partition, and how to stop it.
struct Running {
    task: JoinHandle<Result<RunReport>>,
    seen: Arc<Mutex<BTreeMap<u32, Vec<String>>>>,
    stop: oneshot::Sender<()>,
}

impl Running {
    /// Every record is noted, then judged.
    fn start<F>(
        group: GroupConsumer,
        policy: RunPolicy,
        judge: impl Fn(ConsumedRecord) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<(), &'static str>> + Send + 'static,
    {
        let seen = Arc::new(Mutex::new(BTreeMap::<u32, Vec<String>>::new()));
        let (stop, stopped) = oneshot::channel();
        let noting = Arc::clone(&seen);
        let handler = move |record: ConsumedRecord| {
            let mut seen = noting.lock();
            seen.entry(record.partition)
                .or_default()
                .push(text(&record));
            judge(record)
        };
        let stopped = async { stopped.await.unwrap_or(()) };
        Self {
            task: tokio::spawn(group.run(policy, handler, stopped)),
            seen,
            stop,
        }
    }

    fn seen(&self, partition: u32) -> Vec<String> {
        let seen = self.seen.lock();
        seen.get(&partition).cloned().unwrap_or_default()
    }

    async fn stop(self) -> Result<RunReport> {
        let _ = self.stop.send(());
        self.task.await.unwrap()
    }
}

fn poison(record: &ConsumedRecord) -> Result<(), &'static str> {
    match &*text(record) {
        "poison" => Err("it is poison"),
        "bomb" => panic!("boom"),
        _ => Ok(()),
    }
}

#[tokio::test]
async fn record_that_fails_for_good_is_set_aside_and_the_next_one_comes_after_it() {
    let (fake, client) = fake(&[&["a", "poison", "b", "bomb", "c"]]).await;
    let (policy, _) = policy(&client);
    let running = Running::start(join(&client).await, policy, async |it| poison(&it));
    fake.wait_for(|fake| fake.committed(GROUP, 0) == Some(5))
        .await;
    let tried = [
        "a", "poison", "poison", "poison", "b", "bomb", "bomb", "bomb", "c",
    ];
    assert_eq!(running.seen(0), tried);
    assert_eq!(fake.values_of(DEAD, 0), ["poison", "bomb"]);
    let report = running.stop().await.unwrap();
    assert_eq!(
        (report.handled, report.failed_attempts, report.dead_lettered),
        (3, 6, 2)
    );
    assert_eq!(fake.group(GROUP).members.len(), 0, "it has left");
    let mut dead = client.consumer(DEAD).until_end().open().await.unwrap();
    let mut origins = Vec::new();
    while let Some(letter) = futures::StreamExt::next(&mut dead).await {
        origins.push(letter.unwrap().dead_letter_origin().unwrap());
    }
    let told: Vec<_> = origins.iter().map(|it| (it.offset, it.attempts)).collect();
    assert_eq!(told, [(1, 3), (3, 3)]);
    assert!(origins[1].error.contains("panicked: boom"), "{origins:?}");
}

#[tokio::test]
async fn record_is_not_acknowledged_before_its_dead_letter_is_stored() {
    let (fake, client) = fake(&[&["a", "poison", "b"]]).await;
    let refused = Arc::new(Mutex::new(0));
    let counting = Arc::clone(&refused);
    fake.on_produce(move |_, _| {
        *counting.lock() += 1;
        Produce::Refuse(error(ErrorCode::StorageFull))
    });
    let producer = ProducerConfig::default().delivery_timeout(Duration::from_millis(50));
    let producer = client.producer(producer).unwrap();
    let policy = impatient().dead_letters(DeadLetter::to(DEAD), producer);
    let running = Running::start(join(&client).await, policy, async |it| poison(&it));
    fake.wait_for(|_| *refused.lock() > 3).await;
    assert_eq!(fake.committed(GROUP, 0), Some(1));
    assert_eq!(running.seen(0).last().unwrap(), "poison", "order is kept");
    fake.on_produce(|_, _| Produce::Serve);
    fake.wait_for(|fake| fake.committed(GROUP, 0) == Some(3))
        .await;
    assert_eq!(fake.values_of(DEAD, 0), ["poison"]);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn record_that_fails_for_good_without_dead_letters_ends_the_run_with_what_was_done_committed()
{
    let (fake, client) = fake(&[&["a", "poison", "b"]]).await;
    let running = Running::start(join(&client).await, impatient(), async |it| poison(&it));
    let error = running.task.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HandlerFailed);
    assert_eq!((error.partition(), error.offset()), (Some(0), Some(1)));
    assert_eq!(text(error.record().unwrap()), "poison");
    assert!(
        std::error::Error::source(&error)
            .unwrap()
            .to_string()
            .contains("it is poison")
    );
    assert_eq!(fake.committed(GROUP, 0), Some(1));
    assert_eq!(fake.group(GROUP).members.len(), 0);
}

#[tokio::test]
async fn partition_whose_handler_is_slow_holds_up_no_other_and_keeps_its_order() {
    let (fake, client) = fake(&[&["a", "b", "c"], &["x", "y", "z"]]).await;
    let gate = Arc::new(Semaphore::new(0));
    let closed = Arc::clone(&gate);
    let running = Running::start(join(&client).await, impatient(), move |record| {
        let gate = Arc::clone(&closed);
        async move {
            if record.partition == 0 {
                gate.acquire().await.unwrap().forget();
            }
            Ok(())
        }
    });
    fake.wait_for(|fake| fake.committed(GROUP, 1) == Some(3))
        .await;
    // Records that come meanwhile wait without a place of their own.
    let producer = client.producer(ProducerConfig::default()).unwrap();
    for value in ["d", "e", "f"] {
        let record = Record::to(TOPIC).partition(0).value(value);
        producer.send(record).await.unwrap();
    }
    assert_eq!(running.seen(0), ["a"]);
    // Others' sessions don't depend on it either: heartbeats go on.
    let beats = fake.state.lock().groups.heartbeats;
    fake.wait_for(|fake| fake.state.lock().groups.heartbeats > beats)
        .await;
    gate.add_permits(6);
    fake.wait_for(|fake| fake.committed(GROUP, 0) == Some(6))
        .await;
    assert_eq!(running.seen(0), ["a", "b", "c", "d", "e", "f"]);
    assert_eq!(running.seen(1), ["x", "y", "z"]);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn run_that_is_stopped_finishes_the_record_in_work_and_leaves_the_rest() {
    let (fake, client) = fake(&[&["a", "b", "c"]]).await;
    let (begun, finish) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let told = (Arc::clone(&begun), Arc::clone(&finish));
    let running = Running::start(join(&client).await, impatient(), move |_| {
        let (begun, finish) = (Arc::clone(&told.0), Arc::clone(&told.1));
        async move {
            begun.notify_one();
            finish.notified().await;
            Ok(())
        }
    });
    begun.notified().await;
    let seen = Arc::clone(&running.seen);
    let stopping = tokio::spawn(running.stop());
    finish.notify_one();
    let report = stopping.await.unwrap().unwrap();
    assert_eq!(report.handled, 1);
    assert_eq!(seen.lock()[&0], ["a"]);
    assert_eq!(fake.committed(GROUP, 0), Some(1));
    assert_eq!(fake.group(GROUP).members.len(), 0);
}

#[tokio::test]
async fn handler_that_never_ends_is_given_up_when_the_run_stops() {
    let (fake, client) = fake(&[&["a", "b"]]).await;
    let policy = impatient().stop_timeout(Duration::from_millis(20));
    let running = Running::start(join(&client).await, policy, |_| pending());
    let seen = Arc::clone(&running.seen);
    fake.wait_for(|_| !seen.lock().is_empty()).await;
    let report = running.stop().await.unwrap();
    assert_eq!(report.handled, 0);
    assert_eq!(fake.committed(GROUP, 0), None);
}

#[tokio::test]
async fn attempt_that_takes_too_long_has_failed() {
    let (fake, client) = fake(&[&["slow", "b"]]).await;
    let (policy, _) = policy(&client);
    let policy = policy.attempt_timeout(Duration::from_millis(10));
    let running = Running::start(join(&client).await, policy, async |record| {
        if text(&record) == "slow" {
            pending::<()>().await;
        }
        Ok(())
    });
    fake.wait_for(|fake| fake.committed(GROUP, 0) == Some(2))
        .await;
    assert_eq!(fake.values_of(DEAD, 0), ["slow"]);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn partition_that_is_taken_away_is_given_up_after_the_record_in_work() {
    let (fake, client) = fake(&[&["a", "b", "c"], &["x", "y", "z"]]).await;
    let gate = Arc::new(Semaphore::new(0));
    let closed = Arc::clone(&gate);
    let revoking = Arc::new(Notify::new());
    let told = Arc::clone(&revoking);
    let policy = impatient().observer(move |event| {
        if matches!(event, GroupEvent::Revoking(_)) {
            told.notify_one();
        }
    });
    let first = Running::start(join(&client).await, policy, move |_| {
        let gate = Arc::clone(&closed);
        async move {
            gate.acquire().await.unwrap().forget();
            Ok(())
        }
    });
    fake.wait_for(|_| first.seen.lock().len() == 2).await;
    let other = fake.client().await;
    let second = Running::start(join(&other).await, impatient(), async |_| Ok(()));
    revoking.notified().await;
    gate.add_permits(6);
    let all = |fake: &Fake| (0..2).all(|n| fake.committed(GROUP, n) == Some(3));
    fake.wait_for(all).await;
    let both = |n| (first.seen(n), second.seen(n));
    let kept = if both(0).1.is_empty() { 0 } else { 1 };
    let (stays, goes) = (both(kept), both(1 - kept));
    assert_eq!((stays.0.len(), stays.1.len()), (3, 0));
    assert_eq!(
        (goes.0.len(), goes.1.len()),
        (1, 2),
        "nothing twice: {goes:?}"
    );
    first.stop().await.unwrap();
    second.stop().await.unwrap();
}

#[tokio::test]
async fn batches_are_tried_and_set_aside_as_a_whole() {
    let (fake, client) = fake(&[]).await;
    client
        .create_topic(TopicSpec::new("many").partitions(1))
        .await
        .unwrap();
    let producer = ProducerConfig::default().linger(Duration::from_millis(50));
    let producer = client.producer(producer).unwrap();
    let mut tickets = Vec::new();
    for value in ["a", "poison", "b"] {
        let record = Record::to("many").value(value);
        tickets.push(producer.enqueue(record).await.unwrap());
    }
    for ticket in tickets {
        ticket.await.unwrap();
    }
    let (policy, _) = policy(&client);
    let interval = Duration::from_millis(20);
    let group = client.group(GROUP).topics(["many"]);
    let group = group
        .commit(CommitMode::every(interval))
        .join()
        .await
        .unwrap();
    let control = group.control();
    let handler = async |records: Vec<ConsumedRecord>| records.iter().try_for_each(poison);
    let run = tokio::spawn(group.run_batches(policy, handler, pending()));
    fake.wait_for(|fake| fake.committed(GROUP, 0) == Some(3))
        .await;
    assert_eq!(fake.values_of(DEAD, 0), ["a", "poison", "b"]);
    control.leave(Duration::from_secs(5)).await.unwrap();
    let report = run.await.unwrap().unwrap();
    assert_eq!((report.dead_lettered, report.failed_attempts), (3, 3));
}

/// Takes the partition away and gives it back, as a reset by force does.
fn grant_anew(fake: &Fake, partition: u32) {
    fake.change(|state| {
        let group = state.groups.groups.get_mut(GROUP).unwrap();
        let mut slots = group.slots.iter_mut();
        let (_, slot) = slots.find(|((_, number), _)| *number == partition).unwrap();
        slot.claim_epoch += 1;
        group.revision += 1;
    });
}

/// Batches by partition and losses, as an observer counts them.
#[derive(Default)]
struct Counts {
    batches: BTreeMap<u32, usize>,
    losses: usize,
}

fn counting(policy: RunPolicy) -> (RunPolicy, Arc<Mutex<Counts>>) {
    let counts = Arc::new(Mutex::new(Counts::default()));
    let counting = Arc::clone(&counts);
    let policy = policy.observer(move |event| {
        let mut counts = counting.lock();
        match event {
            GroupEvent::Batch(batch) => *counts.batches.entry(batch.partition()).or_default() += 1,
            GroupEvent::Lost(_) => counts.losses += 1,
            _ => {}
        }
    });
    (policy, counts)
}

#[tokio::test]
async fn partition_that_waits_is_read_on_when_it_is_lost_and_comes_back() {
    let (fake, client) = fake(&[&["a", "b", "c"]]).await;
    let gate = Arc::new(Semaphore::new(0));
    let closed = Arc::clone(&gate);
    let (policy, counts) = counting(impatient());
    let running = Running::start(join(&client).await, policy, move |_| {
        let gate = Arc::clone(&closed);
        async move {
            gate.acquire().await.unwrap().forget();
            Ok(())
        }
    });
    // One in work, and one that waits: no more are asked for.
    fake.wait_for(|_| counts.lock().batches.get(&0) == Some(&2))
        .await;
    grant_anew(&fake, 0);
    fake.wait_for(|_| counts.lock().losses == 1).await;
    gate.add_permits(100);
    fake.wait_for(|fake| fake.committed(GROUP, 0) == Some(3))
        .await;
    running.stop().await.unwrap();
}

#[tokio::test]
async fn partition_that_comes_back_before_its_turn_is_in_work_once_at_a_time() {
    let (fake, client) = fake(&[&["a"], &["a"], &["a"]]).await;
    let gate = Arc::new(Semaphore::new(0));
    let closed = Arc::clone(&gate);
    let (policy, counts) = counting(impatient().partitions_at_once(2));
    let in_work = Arc::new(Mutex::new((BTreeMap::<u32, usize>::new(), 1)));
    let noting = Arc::clone(&in_work);
    let running = Running::start(join(&client).await, policy, move |record| {
        let (gate, in_work) = (Arc::clone(&closed), Arc::clone(&noting));
        async move {
            {
                let (now, most) = &mut *in_work.lock();
                let count = now.entry(record.partition).or_default();
                *count += 1;
                *most = (*most).max(*count);
            }
            gate.acquire().await.unwrap().forget();
            *in_work.lock().0.entry(record.partition).or_default() -= 1;
            Ok(())
        }
    });
    fake.wait_for(|_| counts.lock().batches.len() == 3 && running.seen.lock().len() == 2)
        .await;
    let waiting = (0..3).find(|it| running.seen(*it).is_empty()).unwrap();
    let producer = client.producer(ProducerConfig::default()).unwrap();
    let record = Record::to(TOPIC).partition(waiting).value("b");
    producer.send(record).await.unwrap();
    grant_anew(&fake, waiting);
    fake.wait_for(|_| counts.lock().losses == 1).await;
    let before = counts.lock().batches[&waiting];
    // Those that come with the new claim, of which one may have been counted by now.
    fake.wait_for(|_| counts.lock().batches[&waiting] >= before.max(3))
        .await;
    gate.add_permits(2);
    let others = (0..3).filter(|it| *it != waiting);
    for other in others {
        fake.wait_for(|fake| fake.committed(GROUP, other) == Some(1))
            .await;
    }
    fake.wait_for(|_| !running.seen(waiting).is_empty()).await;
    gate.add_permits(100);
    fake.wait_for(|fake| fake.committed(GROUP, waiting) == Some(2))
        .await;
    assert_eq!(in_work.lock().1, 1);
    assert_eq!(running.seen(waiting), ["a", "b"]);
    running.stop().await.unwrap();
}
