//! Partitions change hands.

use super::*;
use qute_client::group::LostReason;

/// What a member has been told, and what it has handled.
#[derive(Default)]
struct Seen {
    held: std::collections::BTreeSet<TopicPartition>,
    handled: Vec<u32>,
    lost: Vec<LostReason>,
}

impl Seen {
    /// Takes an event in; batches are handled and acknowledged at once.
    fn take(&mut self, event: Event) {
        match event {
            Event::Assigned(it) => self.held.extend(it.partitions),
            Event::Revoking(it) => self.held.retain(|held| !it.partitions.contains(held)),
            Event::Lost(it) => {
                self.held.retain(|held| !it.partitions.contains(held));
                self.lost.push(it.reason);
            }
            Event::Batch(batch) => {
                assert!(self.held.contains(&batch.topic_partition()), "{batch:?}");
                self.handled.extend(values(&batch));
                assert!(batch.ack());
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Runs two members until the condition holds.
async fn run_both(
    a: (&mut GroupConsumer, &mut Seen),
    b: (&mut GroupConsumer, &mut Seen),
    what: &str,
    holds: impl Fn(&Seen, &Seen) -> bool,
) {
    let running = async {
        while !holds(a.1, b.1) {
            tokio::select! {
                Some(event) = a.0.next() => a.1.take(event),
                Some(event) = b.0.next() => b.1.take(event),
            }
        }
    };
    let ran = tokio::time::timeout(LIMIT, running).await;
    ran.unwrap_or_else(|_| panic!("in vain: {what}"));
}

#[tokio::test]
async fn members_share_the_partitions_and_every_record_is_handled_once() {
    let fake = Fake::start(2, 4).await;
    let client = fake.client().await;
    fill(&client, 4, 0..200).await;
    let (mut a, mut b) = (Seen::default(), Seen::default());
    let mut first = join(&client).await;
    while a.handled.len() < 50 {
        a.take(next(&mut first).await);
    }
    let mut second = join(&client).await;
    run_both(
        (&mut first, &mut a),
        (&mut second, &mut b),
        "two each",
        |a, b| a.held.len() == 2 && b.held.len() == 2,
    )
    .await;
    fill(&client, 4, 200..400).await;
    run_both(
        (&mut first, &mut a),
        (&mut second, &mut b),
        "all records",
        |a, b| a.handled.len() + b.handled.len() >= 400,
    )
    .await;
    assert!(b.handled.len() >= 100);
    second.leave(LIMIT).await.unwrap();
    while a.held.len() < 4 {
        a.take(next(&mut first).await);
    }
    let mut all: Vec<u32> = a.handled.iter().chain(&b.handled).copied().collect();
    all.sort_unstable();
    assert_eq!(all, (0..400).collect::<Vec<_>>());
    assert!(a.lost.is_empty() && b.lost.is_empty());
}

#[tokio::test]
async fn partitions_that_stay_flow_on_while_the_others_wait_for_their_handler() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 2, 0..2).await;
    let mut first = join(&client).await;
    let mut held = BTreeMap::new();
    while held.len() < 2 {
        let batch = next_batch(&mut first).await;
        held.insert(batch.partition(), batch);
    }
    let mut second = join(&client).await;
    let going = loop {
        match next(&mut first).await {
            Event::Revoking(it) => break it.partitions[0].partition,
            Event::Batch(_) => panic!("nothing was written"),
            _ => {}
        }
    };
    let staying = 1 - going;
    write(&client, staying, 7).await;
    write(&client, going, 8).await;
    assert_eq!(values(&next_batch(&mut first).await), [7]);
    assert!(futures::poll!(second.next()).is_pending());
    assert!(held.remove(&going).unwrap().ack());
    match next(&mut second).await {
        Event::Assigned(it) => assert_eq!(it.partitions, partitions([going])),
        other => panic!("{other:?}"),
    }
    let batch = next_batch(&mut second).await;
    assert_eq!((batch.offsets().start, values(&batch)), (1, vec![8]));
    assert!(held.remove(&staying).unwrap().ack(), "this one stayed");
}

#[tokio::test]
async fn partition_that_is_not_finished_by_the_revoke_deadline_goes_and_is_read_again() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 2, 0..2).await;
    let builder = group(&client).revoke_timeout(Duration::from_millis(50));
    let mut first = builder.join().await.unwrap();
    let mut held = BTreeMap::new();
    while held.len() < 2 {
        let batch = next_batch(&mut first).await;
        held.insert(batch.partition(), batch);
    }
    let mut second = join(&client).await;
    let lost = loop {
        match next(&mut first).await {
            Event::Lost(it) => break it,
            Event::Revoking(it) => assert!(it.deadline > std::time::Instant::now() - LIMIT),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(lost.reason, LostReason::RevokeTimeout);
    let gone = held.remove(&lost.partitions[0].partition).unwrap();
    let batch = next_batch(&mut second).await;
    assert_eq!(values(&batch), values(&gone), "again");
    assert!(!gone.ack());
}

#[tokio::test]
async fn partition_that_the_program_gives_up_goes_at_once() {
    let fake = Fake::start(1, 2).await;
    let client = fake.client().await;
    fill(&client, 2, 0..2).await;
    let mut first = join(&client).await;
    let mut held = Vec::new();
    while held.len() < 2 {
        held.push(next_batch(&mut first).await);
    }
    let mut second = join(&client).await;
    loop {
        if let Event::Revoking(it) = next(&mut first).await {
            first.control().give_up(&it.partitions);
            break;
        }
    }
    assert!(next_batch(&mut second).await.ack());
}

#[tokio::test]
async fn many_members_settle_with_each_partition_in_one_hand() {
    let fake = Fake::start(2, 12).await;
    let client = fake.client().await;
    let mut members = Vec::new();
    for _ in 0..5 {
        let mut member = join(&client).await;
        members.push(tokio::spawn(async move {
            let mut seen = Seen::default();
            while let Some(event) = member.next().await {
                seen.take(event);
            }
        }));
    }
    let settled = |fake: &Fake| {
        let group = fake.group(GROUP);
        let mut counts: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
        for slot in group.slots.values() {
            if slot.holder == slot.target
                && let Some(holder) = &slot.holder
            {
                *counts.entry(holder.to_vec()).or_default() += 1;
            }
        }
        counts.len() == 5
            && counts.values().sum::<usize>() == 12
            && counts.values().all(|it| *it >= 2)
    };
    until("two or three each", || settled(&fake)).await;
    for member in members {
        member.abort();
    }
    until("all have left", || fake.group(GROUP).members.is_empty()).await;
}
