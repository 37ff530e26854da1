//! Which replica a partition is read from: the leader, followed at once; or the nearest, as long as it
//! serves.

use std::time::Duration;

use futures::StreamExt;
use qute_client::{Client, ClientConfig, Consumer, OutOfRange, Position};
use qute_proto::v1::{self, ErrorCode};

use super::fake::fetch::Follower;
use super::fake::{Fake, TOPIC, error, not_leader};
use super::{all, fill, next, read_all, until, write};

const EVERYTHING: u64 = u64::MAX;

/// Broker 1 leads in rack a; 2 and 3 follow in rack b. What they do as followers is scripted.
async fn racks(partitions: usize) -> Fake {
    let fake = Fake::start(3, partitions).await;
    fake.change(|state| {
        for (broker, rack) in [(1, "a"), (2, "b"), (3, "b")] {
            state.racks.insert(broker, rack.to_owned());
        }
        for partition in 0..partitions {
            state.partition(partition).followers = vec![2, 3];
        }
        for broker in [2, 3] {
            let follower = Follower::ServeTo(EVERYTHING);
            state.fetch.followers.insert(broker, follower);
        }
    });
    fake
}

/// A client in a rack, and with little patience.
async fn client_in(fake: &Fake, rack: &str) -> Client {
    let mut config = ClientConfig::new(&fake.bootstrap()).unwrap().rack(rack);
    config.keep_alive_interval = Duration::from_millis(100);
    config.keep_alive_timeout = Duration::from_millis(150);
    Client::connect_with(config).await.unwrap()
}

/// A client in rack b that never loses its patience with a silent broker.
async fn patient_client(fake: &Fake) -> Client {
    let mut config = ClientConfig::new(&fake.bootstrap()).unwrap().rack("b");
    config.keep_alive_interval = Duration::from_secs(3600);
    Client::connect_with(config).await.unwrap()
}

async fn open(client: &Client) -> Consumer {
    let consumer = client.consumer(TOPIC).nearest_replica(true);
    consumer.open().await.unwrap()
}

fn brokers(fake: &Fake, partition: u32) -> Vec<(u64, u64, bool)> {
    fake.state.lock().fetch.of_partition(partition)
}

#[tokio::test]
async fn follower_in_the_rack_serves_and_several_share_the_partitions() {
    let fake = racks(4).await;
    let client = client_in(&fake, "b").await;
    fill(&client, 0..500).await;
    let consumer = client.consumer(TOPIC).nearest_replica(true).until_end();
    let values = read_all(consumer.open().await.unwrap()).await;
    assert_eq!(all(&values), (0..500).collect::<Vec<_>>());
    let state = fake.state.lock();
    assert!(
        !state.fetch.sent_bytes.contains_key(&1),
        "none by the leader"
    );
    assert_eq!(state.fetch.sent_bytes.len(), 2);
    assert!(state.fetch.subscribed.iter().all(|(_, one)| one.follower));
}

#[tokio::test]
async fn leader_serves_who_does_not_ask_for_a_follower_or_has_none_nearby() {
    let fake = racks(1).await;
    let near = client_in(&fake, "b").await;
    fill(&near, 0..10).await;
    for (client, nearest) in [
        (near.clone(), false),
        (client_in(&fake, "a").await, true),
        (client_in(&fake, "c").await, true),
        (fake.client().await, true),
    ] {
        let consumer = client.consumer(TOPIC).nearest_replica(nearest).until_end();
        assert_eq!(consumer.open().await.unwrap().count().await, 10);
    }
    // Neither brokers without a replica, nor dead or suspect ones.
    fake.change(|state| {
        state.cluster_index += 1;
        state.partition(0).followers = vec![2];
        state.states.insert(2, v1::BrokerState::Suspect);
    });
    until(&fake, "told", |_| true).await;
    let client = client_in(&fake, "b").await;
    let consumer = client.consumer(TOPIC).nearest_replica(true).until_end();
    assert_eq!(consumer.open().await.unwrap().count().await, 10);
    assert!(brokers(&fake, 0).iter().all(|one| *one == (1, 0, false)));
}

#[tokio::test]
async fn follower_that_refuses_costs_a_walk_to_the_leader() {
    for refusal in [
        not_leader(1, 5),
        error(ErrorCode::NotReady),
        error(ErrorCode::UnknownPartition),
        error(ErrorCode::InvalidArgument),
        error(ErrorCode::ReplicaQuarantined),
    ] {
        let fake = racks(1).await;
        let client = client_in(&fake, "b").await;
        fill(&client, 0..100).await;
        let refuse = Follower::Refuse(refusal);
        fake.change(|state| state.fetch.followers.insert(2, refuse));
        let consumer = client.consumer(TOPIC).nearest_replica(true).until_end();
        let values = read_all(consumer.open().await.unwrap()).await;
        assert_eq!(all(&values), (0..100).collect::<Vec<_>>());
        assert_eq!(brokers(&fake, 0), [(2, 0, true), (1, 0, false)]);
    }
}

#[tokio::test]
async fn s18_follower_is_not_believed_about_offsets_out_of_range() {
    let fake = racks(1).await;
    let client = client_in(&fake, "b").await;
    fill(&client, 0..100).await;
    let out_of_range = v1::Error {
        bounds: Some(v1::OffsetBounds {
            log_start_offset: 50,
            high_watermark: 60,
        }),
        ..error(ErrorCode::OffsetOutOfRange)
    };
    let refuse = Follower::Refuse(out_of_range);
    fake.change(|state| state.fetch.followers.insert(2, refuse));
    let consumer = client.consumer(TOPIC).nearest_replica(true).until_end();
    let consumer = consumer.out_of_range(OutOfRange::ToStart);
    let values = read_all(consumer.open().await.unwrap()).await;
    assert_eq!(all(&values), (0..100).collect::<Vec<_>>());
}

#[tokio::test]
async fn frozen_follower_is_left_at_once_when_it_is_suspected_and_costs_only_its_partitions() {
    let fake = racks(2).await;
    let client = patient_client(&fake).await;
    let mut consumer = open(&client).await;
    for partition in [0, 1] {
        write(&client, partition, 0).await;
        next(&mut consumer).await.unwrap();
    }
    // Partition 0 is read from broker 2, partition 1 from broker 3.
    fake.change(|state| state.fetch.frozen.insert(2));
    write(&client, 0, 1).await;
    write(&client, 1, 1).await;
    assert_eq!(next(&mut consumer).await.unwrap().partition, 1);
    fake.change(|state| {
        state.cluster_index += 1;
        state.states.insert(2, v1::BrokerState::Suspect);
    });
    let record = next(&mut consumer).await.unwrap();
    assert_eq!((record.partition, record.offset), (0, 1));
    // The other one in the rack takes over.
    assert_eq!(brokers(&fake, 0).last(), Some(&(3, 1, true)));
}

#[tokio::test]
async fn follower_that_never_answers_costs_its_patience() {
    let fake = racks(1).await;
    fake.change(|state| state.fetch.followers.insert(2, Follower::Silent));
    let client = client_in(&fake, "b").await;
    fill(&client, 0..100).await;
    let consumer = client.consumer(TOPIC).nearest_replica(true).until_end();
    let values = read_all(consumer.open().await.unwrap()).await;
    assert_eq!(all(&values), (0..100).collect::<Vec<_>>());
    assert_eq!(brokers(&fake, 0), [(2, 0, true), (1, 0, false)]);
}

#[tokio::test]
async fn follower_that_falls_behind_in_silence_is_left_and_tried_again_later() {
    let fake = racks(1).await;
    let client = client_in(&fake, "b").await;
    for value in 0..10 {
        write(&client, 0, value).await;
    }
    fake.change(|state| state.fetch.followers.insert(2, Follower::ServeTo(5)));
    let mut consumer = open(&client).await;
    for offset in 0..10 {
        assert_eq!(next(&mut consumer).await.unwrap().offset, offset);
    }
    assert_eq!(brokers(&fake, 0), [(2, 0, true), (1, 5, false)]);
    let follower = Follower::ServeTo(EVERYTHING);
    fake.change(|state| state.fetch.followers.insert(2, follower));
    until(&fake, "back at the follower", |state| {
        state.fetch.of_partition(0).last() == Some(&(2, 10, true))
    })
    .await;
    write(&client, 0, 10).await;
    assert_eq!(next(&mut consumer).await.unwrap().offset, 10);
    // It has nothing to send, which is not silence, however often the leader is asked.
    let subscribed = brokers(&fake, 0).len();
    let asked = fake.state.lock().offset_calls;
    until(&fake, "asked", |state| state.offset_calls >= asked + 4).await;
    assert_eq!(brokers(&fake, 0).len(), subscribed);
}

#[tokio::test]
async fn follower_that_does_not_answer_when_tried_again_costs_the_leaders_partition_nothing() {
    let refuse = Follower::Refuse(error(ErrorCode::NotReady));
    for fault in [Follower::Silent, refuse] {
        let fake = racks(1).await;
        fake.change(|state| state.fetch.followers.insert(2, fault));
        let client = client_in(&fake, "b").await;
        let mut consumer = open(&client).await;
        for round in 1..=3u64 {
            // The first time it is asked alone, then beside the leader.
            until(&fake, "asked", |state| {
                let asked = state.fetch.of_partition(0);
                asked.iter().filter(|one| one.0 == 2).count() as u64 >= round
            })
            .await;
            write(&client, 0, round).await;
            assert_eq!(next(&mut consumer).await.unwrap().offset, round - 1);
        }
        let of_leader = brokers(&fake, 0).into_iter().filter(|one| one.0 == 1);
        assert_eq!(of_leader.collect::<Vec<_>>(), [(1, 0, false)], "never left");
    }
}

#[tokio::test]
async fn stale_follower_is_left_although_another_partition_has_no_leader() {
    let fake = racks(2).await;
    let client = client_in(&fake, "b").await;
    for value in 0..10 {
        write(&client, 0, value).await;
    }
    fake.change(|state| {
        for broker in [2, 3] {
            let follower = Follower::ServeTo(5);
            state.fetch.followers.insert(broker, follower);
        }
    });
    let consumer = client.consumer(TOPIC).nearest_replica(true);
    let consumer = consumer.start(Position::Offset(0)).open();
    let mut consumer = consumer.await.unwrap();
    // Nobody knows where its leader is.
    fake.set_leader(1, 99, 6);
    for offset in 0..10 {
        assert_eq!(next(&mut consumer).await.unwrap().offset, offset);
    }
}

#[tokio::test]
async fn reading_goes_back_and_forth_between_replicas_without_a_hole_or_a_double() {
    let fake = racks(2).await;
    let client = client_in(&fake, "b").await;
    fill(&client, 0..1500).await;
    let consumer = client.consumer(TOPIC).nearest_replica(true).until_end();
    let consumer = consumer.prefetch_bytes(1).open().await.unwrap();
    let mut next = consumer.positions();
    let mut batches = consumer.into_batches();
    let mut count = 0;
    let mut round = 0u64;
    while let Some(batch) = batches.next().await {
        let batch = batch.unwrap();
        for record in &batch.records {
            assert_eq!(record.offset, next[&batch.partition]);
            next.insert(batch.partition, record.offset + 1);
            count += 1;
        }
        round += 1;
        match round % 6 {
            // The follower is suspected, then not any more; streams are cut.
            1 => fake.change(|state| {
                state.cluster_index += 1;
                state.states.insert(2 + round % 2, v1::BrokerState::Suspect);
            }),
            3 => fake.change(|state| state.cut_fetch_after = Some(1)),
            4 => fake.change(|state| {
                state.cluster_index += 1;
                state.states.clear();
            }),
            5 => fake.set_leader(0, round % 3 + 1, 5 + round),
            _ => {}
        }
    }
    assert_eq!(count, 1500);
}

#[tokio::test]
async fn newer_epoch_is_followed_at_once_from_a_frozen_leader_and_the_others_go_on() {
    let fake = Fake::start(2, 2).await;
    fake.set_leader(1, 2, 6);
    let client = patient_client(&fake).await;
    let mut consumer = client.consumer(TOPIC).open().await.unwrap();
    write(&client, 0, 0).await;
    write(&client, 1, 0).await;
    for _ in 0..2 {
        next(&mut consumer).await.unwrap();
    }
    // Its streams stay open; it does not say that it was deposed.
    fake.change(|state| state.fetch.frozen.insert(1));
    write(&client, 1, 1).await;
    assert_eq!(next(&mut consumer).await.unwrap().partition, 1);
    fake.set_leader(0, 2, 7);
    write(&client, 0, 1).await;
    let record = next(&mut consumer).await.unwrap();
    assert_eq!((record.partition, record.offset), (0, 1));
    assert_eq!(brokers(&fake, 0).last(), Some(&(2, 1, false)));
}

#[tokio::test]
async fn leader_that_never_answers_is_asked_again() {
    let fake = racks(1).await;
    let client = client_in(&fake, "a").await;
    write(&client, 0, 0).await;
    fake.change(|state| state.fetch.frozen.insert(1));
    let consumer = client.consumer(TOPIC).start(Position::Offset(0));
    let mut consumer = consumer.open().await.unwrap();
    until(&fake, "asked twice", |state| {
        state.fetch.of_partition(0).len() >= 2
    })
    .await;
    fake.change(|state| state.fetch.frozen.clear());
    assert_eq!(next(&mut consumer).await.unwrap().offset, 0);
}
