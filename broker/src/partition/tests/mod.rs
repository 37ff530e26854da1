//! One replica with the real store and the real Raft below it.

mod cuts;
mod following;

use std::time::Duration;

use futures::future::join_all;
use qute_proto::batch::{Codec, HEADER_BYTES, ProducerStamp};
use qute_proto::ids::{Offset, ProducerId};

use super::door::Ack;
use super::error::Error;
use super::registry::{Hosted, OpenError};
use super::replica::{ListPosition, Replica};
use super::testing::{PATIENCE, START_MS, TestBroker, batch, partition, records, serving, spec};

async fn append(replica: &Replica, bytes: bytes::Bytes) -> Result<Ack, Error> {
    tokio::time::timeout(PATIENCE, replica.append(bytes)?)
        .await
        .unwrap()
}

async fn read_all(replica: &Replica) -> Vec<(u64, bytes::Bytes)> {
    let leader_epoch = replica.serving().unwrap();
    let mut all = Vec::new();
    let mut from = replica.bounds().log_start;
    loop {
        let chunk = replica.read(from, 1 << 20, leader_epoch).await.unwrap();
        if chunk.batches.is_empty() {
            return all;
        }
        let batches = chunk.batches.into_iter();
        all.extend(batches.map(|one| (one.base_offset.0, one.bytes)));
        from = chunk.next_offset;
    }
}

#[tokio::test]
async fn appended_batch_is_read_back_untouched_at_its_offset() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    let (first, second) = (batch(7, 0, 3), batch(7, 3, 2));
    assert_eq!(
        append(&replica, first.clone()).await.unwrap().base_offset,
        Offset(0)
    );
    let ack = append(&replica, second.clone()).await.unwrap();
    assert_eq!((ack.base_offset, ack.duplicate), (Offset(3), false));
    assert_eq!(Some(ack.leader_epoch), replica.serving());
    assert_eq!(read_all(&replica).await, [(0, first), (3, second)]);
    assert_eq!(replica.bounds().high_watermark, Offset(5));
    broker.stop().await;
}

#[tokio::test]
async fn read_from_the_middle_of_a_batch_gives_the_batch() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    append(&replica, batch(7, 0, 10)).await.unwrap();
    let epoch = replica.serving().unwrap();
    let chunk = replica.read(Offset(4), 1, epoch).await.unwrap();
    assert_eq!(chunk.batches[0].base_offset, Offset(0));
    assert_eq!(chunk.next_offset, Offset(10));
    let other = replica.read(Offset(4), 1, epoch + 1).await;
    assert_eq!(other, Err(Error::NotLeader));
    broker.stop().await;
}

// S12
#[tokio::test]
async fn retried_batch_gets_its_original_offset() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    append(&replica, batch(7, 0, 3)).await.unwrap();
    append(&replica, batch(8, 0, 3)).await.unwrap();
    let ack = append(&replica, batch(7, 0, 3)).await.unwrap();
    assert_eq!((ack.base_offset, ack.duplicate), (Offset(0), true));
    assert_eq!(replica.bounds().high_watermark, Offset(6));
    broker.stop().await;
}

// S11
#[tokio::test]
async fn duplicate_of_a_batch_in_flight_shares_its_fate() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    let submitted: Vec<_> = (0..4)
        .map(|_| replica.append(batch(7, 0, 3)).unwrap())
        .collect();
    let acks: Vec<Ack> = join_all(submitted)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    assert!(acks.iter().all(|ack| ack.base_offset == Offset(0)));
    assert_eq!(acks.iter().filter(|ack| !ack.duplicate).count(), 1);
    assert_eq!(replica.bounds().high_watermark, Offset(3));
    broker.stop().await;
}

#[tokio::test]
async fn pipelined_batches_keep_the_order_of_calls() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    let mut submitted = Vec::new();
    for n in 0..300 {
        submitted.push(replica.append(batch(1, n * 2, 2)).unwrap());
        submitted.push(replica.append(batch(2, n, 1)).unwrap());
        submitted.push(replica.append(batch(0, 0, 1)).unwrap());
    }
    let mut next = 0;
    for (n, ack) in join_all(submitted).await.into_iter().enumerate() {
        assert_eq!(ack.unwrap().base_offset, Offset(next));
        next += if n % 3 == 0 { 2 } else { 1 };
    }
    assert_eq!(replica.bounds().high_watermark, Offset(1200));
    broker.stop().await;
}

#[tokio::test]
async fn batch_ahead_of_its_turn_is_refused_until_its_turn() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    append(&replica, batch(7, 0, 1)).await.unwrap();
    let early = append(&replica, batch(7, 2, 1)).await;
    assert_eq!(
        early,
        Err(Error::OutOfOrder {
            expected: 1,
            actual: 2
        })
    );
    append(&replica, batch(7, 1, 1)).await.unwrap();
    let ack = append(&replica, batch(7, 2, 1)).await.unwrap();
    assert_eq!(ack.base_offset, Offset(2));
    assert_eq!(
        append(&replica, batch(9, 1, 1)).await,
        Err(Error::UnknownProducer)
    );
    broker.stop().await;
}

#[tokio::test]
async fn older_epoch_is_fenced() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    let of_epoch = |epoch, base_sequence| {
        let stamp = ProducerStamp {
            producer_id: ProducerId(7),
            epoch,
            base_sequence,
        };
        records(stamp, &[b"v"], Codec::None)
    };
    append(&replica, of_epoch(1, 0)).await.unwrap();
    append(&replica, of_epoch(2, 0)).await.unwrap();
    assert_eq!(
        append(&replica, of_epoch(1, 1)).await,
        Err(Error::Fenced {
            current: 2,
            actual: 1
        })
    );
    broker.stop().await;
}

#[tokio::test]
async fn corrupt_batches_are_refused_and_the_partition_goes_on() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    let sound = batch(7, 0, 3);
    let mut flipped = sound.to_vec();
    flipped[HEADER_BYTES + 2] ^= 1;
    for bad in [
        flipped.into(),
        bytes::Bytes::new(),
        sound.slice(..sound.len() - 1),
        bytes::Bytes::from(vec![0xff; 100]),
    ] {
        assert!(matches!(replica.append(bad), Err(Error::Corrupt(_))));
    }
    let ack = append(&replica, sound).await.unwrap();
    assert_eq!(ack.base_offset, Offset(0));
    broker.stop().await;
}

// Index is not offset: a restart is an election and a blank entry.
#[tokio::test]
async fn elections_leave_no_holes_in_offsets() {
    let mut broker = TestBroker::start().await;
    let mut epochs = Vec::new();
    for n in 0..4 {
        let replica = broker.open(0).await;
        let ack = append(&replica, batch(7, n, 1)).await.unwrap();
        assert_eq!(ack.base_offset, Offset(n));
        epochs.push(ack.leader_epoch);
        drop(replica);
        broker = broker.restart().await;
    }
    // S8: a restarted leader takes a new term.
    assert!(
        epochs.windows(2).all(|pair| pair[0] < pair[1]),
        "{epochs:?}"
    );
    let replica = broker.open(0).await;
    let offsets: Vec<u64> = read_all(&replica).await.iter().map(|one| one.0).collect();
    assert_eq!(offsets, [0, 1, 2, 3]);
    broker.stop().await;
}

// S12, S13: by replay of the log alone, and through the checkpoint at a segment roll.
#[tokio::test]
async fn restart_keeps_the_producer_table() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    append(&replica, batch(1, 0, 3)).await.unwrap();
    let broker = {
        drop(replica);
        broker.restart().await
    };
    let replica = broker.open(0).await;
    let ack = append(&replica, batch(1, 0, 3)).await.unwrap();
    assert_eq!((ack.base_offset, ack.duplicate), (Offset(0), true));

    // Over several segments of 64 KiB.
    let value = vec![b'x'; 10_000];
    for n in 0..40 {
        let stamp = ProducerStamp {
            producer_id: ProducerId(2),
            epoch: 0,
            base_sequence: n,
        };
        append(&replica, records(stamp, &[&value], Codec::None))
            .await
            .unwrap();
    }
    drop(replica);
    let broker = broker.restart().await;
    let replica = broker.open(0).await;
    let ack = append(&replica, batch(1, 0, 3)).await.unwrap();
    assert_eq!((ack.base_offset, ack.duplicate), (Offset(0), true));
    let ack = append(&replica, batch(1, 3, 1)).await.unwrap();
    assert_eq!((ack.base_offset, ack.duplicate), (Offset(43), false));
    assert_eq!(read_all(&replica).await.len(), 42);
    broker.stop().await;
}

// S17
#[tokio::test]
async fn log_start_is_replicated_and_survives_a_restart() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    for n in 0..6 {
        append(&replica, batch(7, n, 1)).await.unwrap();
    }
    assert_eq!(replica.set_log_start(Offset(4)).await, Ok(Offset(4)));
    assert_eq!(replica.set_log_start(Offset(2)).await, Ok(Offset(4)));
    drop(replica);
    let broker = broker.restart().await;
    let replica = broker.open(0).await;
    let epoch = replica.serving().unwrap();
    assert_eq!(
        replica.read(Offset(3), 1, epoch).await,
        Err(Error::OutOfRange {
            offset: Offset(3),
            log_start: Offset(4),
            high_watermark: Offset(6)
        })
    );
    assert_eq!(read_all(&replica).await.len(), 2);
    let listed = replica.list_offset(ListPosition::Start, PATIENCE).await;
    assert_eq!(listed.unwrap().offset, Offset(4));
    broker.stop().await;
}

// S18, S19
#[tokio::test]
async fn offsets_are_listed_by_position_and_broker_time() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    for n in 0..5 {
        append(&replica, batch(7, n * 2, 2)).await.unwrap();
        broker.clock.advance(Duration::from_millis(100));
    }
    let list = async |position| {
        let listed = replica.list_offset(position, PATIENCE).await.unwrap();
        assert_eq!(Some(listed.leader_epoch), replica.serving());
        listed.offset.0
    };
    assert_eq!(list(ListPosition::Start).await, 0);
    assert_eq!(list(ListPosition::End).await, 10);
    assert_eq!(list(ListPosition::Time(0)).await, 0);
    assert_eq!(list(ListPosition::Time(START_MS + 100)).await, 2);
    assert_eq!(list(ListPosition::Time(START_MS + 101)).await, 4);
    assert_eq!(list(ListPosition::Time(START_MS + 1000)).await, 10);
    broker.stop().await;
}

// S18: ahead of the high watermark a reader waits.
#[tokio::test]
async fn reader_at_the_end_wakes_when_a_record_commits() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    let epoch = replica.serving().unwrap();
    let mut waiting = Box::pin(replica.wait_beyond(Offset(1), epoch));
    assert!(futures::poll!(&mut waiting).is_pending());
    append(&replica, batch(7, 0, 1)).await.unwrap();
    assert!(futures::poll!(&mut waiting).is_pending());
    append(&replica, batch(7, 1, 1)).await.unwrap();
    tokio::time::timeout(PATIENCE, waiting)
        .await
        .unwrap()
        .unwrap();
    broker.stop().await;
}

#[tokio::test]
async fn closed_replica_ends_its_readers_and_refuses_writes() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    let epoch = replica.serving().unwrap();
    let waiting = replica.wait_beyond(Offset(0), epoch);
    let (ended, ()) = tokio::join!(waiting, broker.replicas.close(partition(0)));
    assert!(ended.is_err());
    let refused = match replica.append(batch(7, 0, 1)) {
        Ok(pending) => pending.await.unwrap_err(),
        Err(error) => error,
    };
    assert_ne!(refused, Error::OutcomeUnknown);
    assert_eq!(
        broker.replicas.serving(partition(0)).err(),
        Some(Error::NotHere(partition(0)))
    );
    drop(replica);
    broker.stop().await;
}

// S9, S22
#[tokio::test]
async fn deleted_replica_is_gone_and_its_id_is_spent() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    append(&replica, batch(7, 0, 1)).await.unwrap();
    drop(replica);
    let wrong = broker
        .replicas
        .delete(partition(0), qute_proto::ids::ReplicaId(99));
    assert!(matches!(wrong.await, Err(OpenError::Occupied { .. })));
    let id = spec(0).replica;
    broker.replicas.delete(partition(0), id).await.unwrap();
    broker.replicas.delete(partition(0), id).await.unwrap();
    assert!(broker.replicas.get(partition(0)).is_none());
    assert!(broker.replicas.open(spec(0)).await.is_err());
    broker.stop().await;
}

// S6, S7
#[tokio::test]
async fn replica_without_its_directory_is_registered_as_quarantined() {
    let broker = TestBroker::start().await;
    let replica = broker.open(0).await;
    append(&replica, batch(7, 0, 1)).await.unwrap();
    drop(replica);
    let dir = broker.stop().await;
    let topic = partition(0).topic.to_string();
    std::fs::remove_dir_all(dir.path().join("topics").join(topic)).unwrap();
    let broker = TestBroker::start_in(dir).await;
    let refused = broker.replicas.open(spec(0)).await.err().unwrap();
    assert!(
        matches!(refused, OpenError::Quarantined { .. }),
        "{refused}"
    );
    assert!(matches!(
        broker.replicas.get(partition(0)),
        Some(Hosted::Quarantined { .. })
    ));
    assert!(matches!(
        broker.replicas.serving(partition(0)),
        Err(Error::Quarantined(_))
    ));
    let other = broker.open(1).await;
    append(&other, batch(7, 0, 1)).await.unwrap();
    broker.stop().await;
}

#[tokio::test]
async fn opening_twice_gives_the_same_replica() {
    let broker = TestBroker::start().await;
    let first = broker.open(0).await;
    let second = broker.replicas.open(spec(0)).await.unwrap();
    assert!(std::sync::Arc::ptr_eq(&first, &second));
    assert!(serving(&second).await > 0);
    broker.stop().await;
}
