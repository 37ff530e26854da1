//! The producer table against a model of the whole history, and its checkpoint form.

use proptest::prelude::*;

use super::*;

fn stamp(producer: u64, epoch: u32, base_sequence: u64, records: u32) -> Stamp {
    Stamp {
        producer: ProducerId(producer),
        epoch,
        base_sequence,
        records,
    }
}

fn table_with(batches: &[(u64, u32, u64, u32)]) -> ProducerTable {
    let mut table = ProducerTable::default();
    let mut offset = 0;
    for (index, &(producer, epoch, sequence, records)) in (1u64..).zip(batches) {
        let batch = stamp(producer, epoch, sequence, records);
        table.record(&batch, Offset(offset), index, index);
        offset += u64::from(records);
    }
    table
}

#[test]
fn unknown_producer_may_only_begin_at_zero() {
    let table = ProducerTable::default();
    assert_eq!(table.judge(&stamp(7, 3, 0, 1)), Verdict::Append);
    assert_eq!(table.judge(&stamp(7, 3, 1, 1)), Verdict::UnknownProducer);
}

#[test]
fn retried_batch_gets_its_original_offset() {
    let table = table_with(&[(7, 0, 0, 10), (8, 0, 0, 5), (7, 0, 10, 3)]);
    assert_eq!(
        table.judge(&stamp(7, 0, 0, 10)),
        Verdict::Duplicate(Offset(0))
    );
    assert_eq!(
        table.judge(&stamp(7, 0, 10, 3)),
        Verdict::Duplicate(Offset(15))
    );
    assert_eq!(table.judge(&stamp(7, 0, 13, 1)), Verdict::Append);
}

#[test]
fn batch_ahead_of_its_turn_is_out_of_order() {
    let table = table_with(&[(7, 0, 0, 10)]);
    assert_eq!(
        table.judge(&stamp(7, 0, 11, 1)),
        Verdict::OutOfOrder { expected: 10 }
    );
    assert_eq!(
        table.judge(&stamp(7, 1, 10, 1)),
        Verdict::OutOfOrder { expected: 0 }
    );
}

#[test]
fn older_epoch_is_fenced_and_a_newer_one_begins_anew() {
    let table = table_with(&[(7, 0, 0, 10), (7, 2, 0, 4)]);
    assert_eq!(
        table.judge(&stamp(7, 1, 0, 1)),
        Verdict::Fenced { current: 2 }
    );
    assert_eq!(table.judge(&stamp(7, 2, 4, 1)), Verdict::Append);
    assert_eq!(table.judge(&stamp(7, 3, 0, 1)), Verdict::Append);
}

#[test]
fn batch_older_than_the_last_five_is_a_duplicate_without_offset() {
    let batches: Vec<_> = (0..7).map(|n| (7, 0, n * 2, 2)).collect();
    let table = table_with(&batches);
    assert_eq!(
        table.judge(&stamp(7, 0, 2, 2)),
        Verdict::DuplicateUnknownOffset
    );
    assert_eq!(
        table.judge(&stamp(7, 0, 4, 2)),
        Verdict::Duplicate(Offset(4))
    );
}

#[test]
fn batch_cut_anew_is_refused() {
    let table = table_with(&[(7, 0, 0, 4), (7, 0, 4, 4)]);
    assert_eq!(table.judge(&stamp(7, 0, 0, 8)), Verdict::Overlapping);
    assert_eq!(table.judge(&stamp(7, 0, 6, 4)), Verdict::Overlapping);
    assert_eq!(table.judge(&stamp(7, 0, 4, u32::MAX)), Verdict::Overlapping);
}

#[test]
fn sequence_at_the_end_of_its_range_does_not_wrap() {
    let table = table_with(&[(7, 0, u64::MAX - 1, 1)]);
    assert_eq!(table.judge(&stamp(7, 0, u64::MAX, 5)), Verdict::Append);
    assert_eq!(stamp(7, 0, u64::MAX, 5).end_sequence(), None);
}

#[test]
fn silent_producer_is_forgotten_by_the_logs_time_only() {
    let mut table = ProducerTable::default();
    table.record(&stamp(1, 0, 0, 1), Offset(0), 1, 1_000);
    table.record(&stamp(2, 0, 0, 1), Offset(1), 2, 1_000 + EXPIRY_MS);
    assert_eq!(table.len(), 2);
    table.record(&stamp(2, 0, 1, 1), Offset(2), 3, 1_001 + EXPIRY_MS);
    assert_eq!(table.len(), 1);
    assert_eq!(table.judge(&stamp(1, 0, 1, 1)), Verdict::UnknownProducer);
}

#[test]
fn full_table_drops_the_least_recent_producer() {
    let mut table = ProducerTable::default();
    let max = u64::try_from(PRODUCERS_MAX).unwrap();
    for id in 0..max {
        table.record(&stamp(id, 0, 0, 1), Offset(id), id, 5);
    }
    assert!(!table.has_room(5 + YOUNG_MS));
    assert!(table.has_room(6 + YOUNG_MS));
    table.record(&stamp(0, 0, 1, 1), Offset(max), max, 5);
    table.record(&stamp(max, 0, 0, 1), Offset(max + 1), max + 1, 5);
    assert_eq!(table.len(), PRODUCERS_MAX);
    assert_eq!(table.judge(&stamp(1, 0, 1, 1)), Verdict::UnknownProducer);
    assert_eq!(table.judge(&stamp(0, 0, 2, 1)), Verdict::Append);
}

#[test]
fn checkpoint_layout_is_fixed() {
    let mut out = Vec::new();
    table_with(&[(7, 3, 0, 2)]).encode(&mut out);
    let golden = [
        &[1u8, 1, 0, 0, 0][..],
        &[7, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0],
        &[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1],
        &[0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0],
        &[0, 0, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    assert_eq!(out, golden);
}

#[test]
fn checkpoint_that_claims_too_much_is_refused() {
    let mut huge = vec![VERSION];
    huge.extend_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(
        ProducerTable::decode(&huge),
        Err(DecodeError::Impossible("count of producers"))
    );
    assert_eq!(
        ProducerTable::decode(&[9, 0, 0, 0, 0]),
        Err(DecodeError::Version(9))
    );
    assert_eq!(ProducerTable::decode(&[]), Err(DecodeError::Length));
}

/// Base sequence, records, base offset.
type Past = (u64, u32, u64);

/// The whole history of each producer, judged naively.
#[derive(Default)]
struct Model {
    history: HashMap<u64, (u32, Vec<Past>)>,
}

impl Model {
    fn judge(&self, batch: &Stamp) -> Verdict {
        let Some((epoch, all)) = self.history.get(&batch.producer.0) else {
            return if batch.base_sequence == 0 {
                Verdict::Append
            } else {
                Verdict::UnknownProducer
            };
        };
        let next: u64 = all.iter().map(|&(_, records, _)| u64::from(records)).sum();
        if batch.epoch < *epoch {
            return Verdict::Fenced { current: *epoch };
        }
        if batch.epoch > *epoch {
            return match batch.base_sequence {
                0 => Verdict::Append,
                _ => Verdict::OutOfOrder { expected: 0 },
            };
        }
        if batch.base_sequence == next {
            return Verdict::Append;
        }
        if batch.base_sequence > next {
            return Verdict::OutOfOrder { expected: next };
        }
        let kept = &all[all.len().saturating_sub(BATCHES_KEPT)..];
        let end = batch.base_sequence + u64::from(batch.records);
        match kept
            .iter()
            .find(|(base, records, _)| (*base, *records) == (batch.base_sequence, batch.records))
        {
            Some((_, _, offset)) => Verdict::Duplicate(Offset(*offset)),
            None if end <= kept[0].0 => Verdict::DuplicateUnknownOffset,
            None => Verdict::Overlapping,
        }
    }

    fn record(&mut self, batch: &Stamp, offset: u64) {
        let entry = self
            .history
            .entry(batch.producer.0)
            .or_insert((batch.epoch, Vec::new()));
        if batch.epoch > entry.0 {
            *entry = (batch.epoch, Vec::new());
        }
        entry.1.push((batch.base_sequence, batch.records, offset));
    }
}

proptest! {
    #[test]
    fn table_agrees_with_the_whole_history(
        steps in prop::collection::vec((0u64..3, 0u32..3, 0u64..30, 1u32..4, any::<bool>()), 1..200)
    ) {
        let mut table = ProducerTable::default();
        let mut model = Model::default();
        let mut offset = 0;
        for (index, (producer, epoch, sequence, records, next)) in (0u64..).zip(steps) {
            // Half of the batches are the next in turn, so that histories grow.
            let sequence = match table.known(ProducerId(producer)) {
                Some((known, batches)) if next && known == epoch => {
                    batches.back().unwrap().end_sequence()
                }
                _ if next => 0,
                _ => sequence,
            };
            let batch = stamp(producer, epoch, sequence, records);
            let verdict = table.judge(&batch);
            prop_assert_eq!(verdict, model.judge(&batch));
            if verdict == Verdict::Append {
                table.record(&batch, Offset(offset), index, index);
                model.record(&batch, offset);
                offset += u64::from(records);
            }
        }
        let mut encoded = Vec::new();
        table.encode(&mut encoded);
        prop_assert_eq!(ProducerTable::decode(&encoded), Ok(table));
        for cut in 0..encoded.len() {
            prop_assert!(ProducerTable::decode(&encoded[..cut]).is_err());
        }
    }

    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = ProducerTable::decode(&bytes);
        let mut versioned = vec![VERSION, 2, 0, 0, 0];
        versioned.extend_from_slice(&bytes);
        let _ = ProducerTable::decode(&versioned);
    }
}
