//! Golden bytes, round trips, and hostile bytes.

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::ids::ProducerId;

const STAMP: ProducerStamp = ProducerStamp {
    producer_id: ProducerId(0x1122_3344_5566_7788),
    epoch: 7,
    base_sequence: 42,
};

fn header(name: &str, value: Option<&'static [u8]>) -> RecordHeader {
    RecordHeader {
        name: name.to_owned(),
        value: value.map(Bytes::from_static),
    }
}

fn golden(codec: Codec) -> Bytes {
    let mut builder = BatchBuilder::new(4096);
    let headers = [header("h", Some(b"v")), header("", None)];
    let records = [
        RecordRef {
            timestamp_ms: 1000,
            key: Some(b"k1"),
            value: Some(b"value"),
            headers: &headers,
        },
        RecordRef {
            timestamp_ms: 999,
            key: None,
            value: Some(b""),
            headers: &[],
        },
        RecordRef {
            timestamp_ms: 1001,
            key: Some(b""),
            value: None,
            headers: &[],
        },
    ];
    for (number, record) in (0u32..).zip(&records) {
        assert_eq!(builder.push(record), Ok(Push::Added(number)));
    }
    builder.finish(codec).unwrap().seal(STAMP)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn batch_golden_bytes_match_the_documented_layout() {
    let batch = golden(Codec::None);
    let expected = [
        "51524201",         // magic, version
        "d16f9604",         // crc
        "00000000",         // codec, reserved
        "03000000",         // record count
        "1c000000",         // body length
        "1c000000",         // uncompressed length
        "e803000000000000", // base timestamp
        "e903000000000000", // max timestamp
        "8877665544332211", // producer id
        "07000000",         // producer epoch
        "00000000",         // reserved
        "2a00000000000000", // base sequence
        // 17 bytes: delta 0, key 2+1 "k1", value 5+1 "value", 2 headers, "h" = "v", "" = absent
        "11",
        "00",
        "036b31",
        "0676616c7565",
        "02",
        "016802",
        "76",
        "0000",
        // 4 bytes: delta -1, no key, empty value, no headers
        "04",
        "01",
        "00",
        "01",
        "00",
        // 4 bytes: delta 1 (zigzag 2), empty key, no value, no headers
        "04",
        "02",
        "01",
        "00",
        "00",
    ]
    .concat();
    assert_eq!(hex(&batch), expected);
}

#[test]
fn batch_absent_and_empty_keys_and_values_stay_different() {
    for codec in [Codec::None, Codec::Lz4, Codec::Zstd] {
        let view = BatchView::parse(golden(codec)).unwrap();
        let records: Vec<_> = view.records().unwrap().map(Result::unwrap).collect();
        assert_eq!(records[1].key, None);
        assert_eq!(records[1].value.as_deref(), Some(&b""[..]));
        assert_eq!(records[2].key.as_deref(), Some(&b""[..]));
        assert_eq!(records[2].value, None);
        assert_eq!(
            records[0].headers,
            [header("h", Some(b"v")), header("", None)]
        );
        assert_eq!(
            records.iter().map(|r| r.timestamp_ms).collect::<Vec<_>>(),
            [1000, 999, 1001]
        );
        assert_eq!(view.header().producer, STAMP);
        assert_eq!(view.header().next_sequence(), 45);
    }
}

#[test]
fn batch_resealed_differs_in_its_stamp_only() {
    let other = ProducerStamp {
        epoch: 8,
        base_sequence: 0,
        ..STAMP
    };
    let batch = golden(Codec::Zstd);
    let resealed = reseal(&batch, other).unwrap();
    assert_eq!(BatchHeader::verify(&resealed).unwrap().producer, other);
    assert_eq!(reseal(&resealed, STAMP).unwrap(), batch);
}

#[test]
fn builder_over_its_limit_says_full_and_is_reusable() {
    let mut builder = BatchBuilder::new(1024);
    let value = [7u8; 300];
    let record = RecordRef {
        timestamp_ms: 5,
        key: None,
        value: Some(&value),
        headers: &[],
    };
    for round in 0..3 {
        for number in 0..3 {
            assert_eq!(
                builder.push(&record),
                Ok(Push::Added(number)),
                "round {round}"
            );
        }
        assert_eq!(builder.push(&record), Ok(Push::Full));
        let size = builder.size_bytes();
        let batch = builder.finish(Codec::None).unwrap();
        assert_eq!(batch.size_bytes(), size);
        assert!(size <= 1024);
        assert!(builder.is_empty());
        assert_eq!(
            BatchView::parse(batch.seal(STAMP))
                .unwrap()
                .records()
                .unwrap()
                .count(),
            3
        );
    }
    assert_eq!(
        builder.finish(Codec::None).map(|_| ()),
        Err(BatchError::Empty)
    );
}

#[test]
fn builder_record_at_the_limit_is_taken_and_over_it_refused() {
    let mut builder = BatchBuilder::new(1024);
    let value = vec![0u8; RECORD_BYTES_MAX];
    let mut record = RecordRef {
        timestamp_ms: 0,
        key: Some(b"k"),
        value: Some(&value),
        headers: &[],
    };
    assert_eq!(
        builder.push(&record),
        Err(BatchError::RecordTooLarge {
            size: RECORD_BYTES_MAX + 1,
            max: RECORD_BYTES_MAX
        })
    );
    record.key = None;
    assert_eq!(builder.push(&record), Ok(Push::Added(0)));
    assert_eq!(builder.push(&record), Ok(Push::Full));
    let many = vec![header("", None); RECORD_HEADERS_MAX + 1];
    record.headers = &many;
    assert!(matches!(
        builder.push(&record),
        Err(BatchError::TooManyHeaders { .. })
    ));
    let batch = builder.finish(Codec::Zstd).unwrap().seal(STAMP);
    assert!(batch.len() < 1024, "compressed");
    assert_eq!(
        BatchView::parse(batch).unwrap().records().unwrap().count(),
        1
    );
}

#[test]
fn batch_incompressible_stays_uncompressed() {
    let mut builder = BatchBuilder::new(4096);
    builder
        .push(&RecordRef {
            timestamp_ms: 0,
            key: None,
            value: Some(b"abc"),
            headers: &[],
        })
        .unwrap();
    for codec in [Codec::Lz4, Codec::Zstd] {
        let batch = builder.finish(codec).unwrap().seal(STAMP);
        assert_eq!(BatchHeader::verify(&batch).unwrap().codec, Codec::None);
        builder
            .push(&RecordRef {
                timestamp_ms: 0,
                key: None,
                value: Some(b"abc"),
                headers: &[],
            })
            .unwrap();
    }
}

/// A batch with a valid checksum around whatever header and body say.
fn forge(edit: impl FnOnce(&mut BatchHeader), body: &[u8]) -> Bytes {
    let mut fixed = BatchHeader {
        crc: 0,
        codec: Codec::None,
        record_count: 1,
        body_bytes: u32::try_from(body.len()).unwrap(),
        uncompressed_bytes: u32::try_from(body.len()).unwrap(),
        base_timestamp_ms: 0,
        max_timestamp_ms: 0,
        producer: STAMP,
    };
    edit(&mut fixed);
    let mut bytes = [&fixed.encode()[..], body].concat();
    let crc = super::header::checksum(&bytes);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes.into()
}

#[test]
fn header_with_impossible_claims_is_refused() {
    let body = [4, 0, 0, 0, 0];
    assert!(
        BatchView::parse(forge(|_| (), &body))
            .unwrap()
            .records()
            .unwrap()
            .next()
            .unwrap()
            .is_ok()
    );
    let refused =
        |edit: fn(&mut BatchHeader)| BatchHeader::verify(&forge(edit, &body)).unwrap_err();
    assert_eq!(
        refused(|h| h.record_count = u32::MAX),
        BatchError::ImpossibleCount {
            count: u32::MAX,
            uncompressed_bytes: 5
        }
    );
    assert_eq!(refused(|h| h.record_count = 0), BatchError::Empty);
    assert!(matches!(
        refused(|h| h.body_bytes = u32::MAX),
        BatchError::BatchTooLarge { .. }
    ));
    assert!(matches!(
        refused(|h| h.uncompressed_bytes = u32::MAX),
        BatchError::UncompressedTooLarge { .. }
    ));
    assert!(matches!(
        refused(|h| h.uncompressed_bytes = 6),
        BatchError::LengthMismatch { .. }
    ));
    assert!(matches!(
        refused(|h| {
            h.body_bytes = 4;
            h.uncompressed_bytes = 5;
            h.codec = Codec::Lz4
        }),
        BatchError::TrailingBytes { extra: 1 }
    ));
}

#[test]
fn header_of_other_magic_version_codec_or_reserved_bits_is_refused() {
    let good = golden(Codec::None);
    let with = |at: usize, byte: u8| {
        let mut bytes = good.to_vec();
        bytes[at] = byte;
        BatchHeader::verify(&bytes).unwrap_err()
    };
    assert!(matches!(with(0, 0), BatchError::BadMagic { .. }));
    assert_eq!(with(3, 2), BatchError::UnsupportedVersion { version: 2 });
    assert_eq!(with(8, 3), BatchError::UnknownCodec { codec: 3 });
    assert_eq!(with(9, 1), BatchError::ReservedBits);
    assert_eq!(with(52, 1), BatchError::ReservedBits);
}

#[test]
fn batch_truncated_anywhere_is_refused() {
    let good = golden(Codec::None);
    for len in 0..good.len() {
        assert!(
            matches!(
                BatchHeader::verify(&good[..len]),
                Err(BatchError::Truncated { .. })
            ),
            "{len}"
        );
    }
    assert_eq!(
        BatchHeader::verify(&[&good[..], b"x"].concat()),
        Err(BatchError::TrailingBytes { extra: 1 })
    );
    assert!(matches!(
        BatchHeader::parse(&[]),
        Err(BatchError::Truncated { .. })
    ));
}

#[test]
fn batch_with_any_bit_flipped_is_refused() {
    for codec in [Codec::None, Codec::Zstd] {
        let good = golden(codec);
        for bit in 0..good.len() * 8 {
            let mut bytes = good.to_vec();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(BatchHeader::verify(&bytes).is_err(), "bit {bit}");
        }
    }
}

#[test]
fn zip_bomb_is_refused_without_its_allocation() {
    // 256 MiB of zeros in a few kilobytes; the header claims the most it may, then less.
    let zeros = vec![0u8; 256 * 1024 * 1024];
    let bomb = zstd::bulk::compress(&zeros, 1).unwrap();
    drop(zeros);
    assert!(bomb.len() < 64 * 1024);
    for claim in [u32::try_from(UNCOMPRESSED_BYTES_MAX).unwrap(), 1000] {
        let batch = forge(
            |h| {
                h.codec = Codec::Zstd;
                h.uncompressed_bytes = claim
            },
            &bomb,
        );
        let refused = BatchView::parse(batch).unwrap().records().unwrap_err();
        assert_eq!(refused, BatchError::Decompress { codec: Codec::Zstd });
    }
    let zeros = vec![0u8; 1024 * 1024];
    let bomb = lz4_flex::block::compress(&zeros);
    let batch = forge(
        |h| {
            h.codec = Codec::Lz4;
            h.uncompressed_bytes = 1000
        },
        &bomb,
    );
    assert!(BatchView::parse(batch).unwrap().records().is_err());
    let batch = forge(
        |h| {
            h.codec = Codec::Lz4;
            h.uncompressed_bytes = 60 << 20
        },
        &bomb,
    );
    assert!(BatchView::parse(batch).unwrap().records().is_err());
}

#[test]
fn body_with_wrong_count_or_lengths_is_refused() {
    let error_of = |count: u32, body: &[u8]| {
        let batch = forge(|h| h.record_count = count, body);
        let records = BatchView::parse(batch).unwrap().records().unwrap();
        records.collect::<Result<Vec<_>, _>>().unwrap_err()
    };
    let bad = |record, what| BatchError::BadRecord { record, what };
    assert_eq!(
        error_of(1, &[4, 0, 0, 0, 0, 4, 0, 0, 0, 0]),
        bad(0, "bytes after the last record")
    );
    assert_eq!(
        error_of(2, &[4, 0, 0, 0, 0, 5, 0, 0, 0, 0]),
        bad(1, "length")
    );
    assert_eq!(error_of(1, &[200, 1, 0, 0, 0, 0]), bad(0, "length"));
    assert_eq!(error_of(1, &[5, 0, 9, 0, 0, 0]), bad(0, "key"));
    assert_eq!(error_of(1, &[5, 0, 0, 0, 5, 0]), bad(0, "header count"));
    assert_eq!(
        error_of(1, &[5, 0, 0, 0, 0, 0]),
        bad(0, "bytes after its end")
    );
    assert_eq!(
        error_of(1, &[7, 0, 0, 0, 1, 1, 0xff, 0]),
        bad(0, "header name")
    );
}

type OwnedRecord = (
    i64,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Vec<(String, Option<Vec<u8>>)>,
);

fn any_record() -> impl Strategy<Value = OwnedRecord> {
    let bytes = || proptest::option::of(proptest::collection::vec(any::<u8>(), 0..40));
    let headers = proptest::collection::vec((".{0,8}", bytes()), 0..4);
    (any::<i64>(), bytes(), bytes(), headers)
}

fn any_codec() -> impl Strategy<Value = Codec> {
    prop_oneof![Just(Codec::None), Just(Codec::Lz4), Just(Codec::Zstd)]
}

proptest! {
    #[test]
    fn batch_round_trip_gives_the_same_records(
        records in proptest::collection::vec(any_record(), 1..60),
        codec in any_codec(),
    ) {
        let mut builder = BatchBuilder::new(BATCH_BYTES_MAX);
        for (timestamp_ms, key, value, headers) in &records {
            let headers: Vec<_> = headers
                .iter()
                .map(|(name, value)| RecordHeader { name: name.clone(), value: value.clone().map(Bytes::from) })
                .collect();
            let pushed = builder.push(&RecordRef {
                timestamp_ms: *timestamp_ms,
                key: key.as_deref(),
                value: value.as_deref(),
                headers: &headers,
            });
            prop_assert!(matches!(pushed, Ok(Push::Added(_))));
        }
        let view = BatchView::parse(builder.finish(codec).unwrap().seal(STAMP)).unwrap();
        prop_assert_eq!(view.header().max_timestamp_ms, records.iter().map(|r| r.0).max().unwrap());
        let decoded: Vec<_> = view.records().unwrap().collect::<Result<_, _>>().unwrap();
        prop_assert_eq!(decoded.len(), records.len());
        for (number, (record, (timestamp_ms, key, value, headers))) in decoded.iter().zip(&records).enumerate() {
            prop_assert_eq!(record.offset_delta as usize, number);
            prop_assert_eq!(record.timestamp_ms, *timestamp_ms);
            prop_assert_eq!(record.key.as_deref(), key.as_deref());
            prop_assert_eq!(record.value.as_deref(), value.as_deref());
            prop_assert_eq!(record.headers.len(), headers.len());
            for (header, (name, value)) in record.headers.iter().zip(headers) {
                prop_assert_eq!(&header.name, name);
                prop_assert_eq!(header.value.as_deref(), value.as_deref());
            }
        }
    }

    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = BatchHeader::parse(&bytes);
        prop_assert!(BatchView::parse(bytes.into()).is_err());
    }

    /// The checksum is made to match, so that the decoders behind it meet the garbage.
    #[test]
    fn garbage_behind_a_valid_checksum_never_panics(
        body in proptest::collection::vec(any::<u8>(), 5..300),
        count in 1u32..70,
        uncompressed in 0u32..4096,
        codec in any_codec(),
    ) {
        let batch = forge(|h| {
            h.record_count = count;
            h.codec = codec;
            if codec != Codec::None { h.uncompressed_bytes = uncompressed; }
        }, &body);
        if let Ok(view) = BatchView::parse(batch)
            && let Ok(records) = view.records()
        {
            prop_assert!(records.count() <= count as usize);
        }
    }

    #[test]
    fn flipped_body_behind_a_valid_checksum_never_panics(
        bit in 0usize..64 * 8,
        codec in any_codec(),
    ) {
        let good = golden(codec);
        let header = BatchHeader::parse(&good).unwrap();
        let mut body = good[HEADER_BYTES..].to_vec();
        let at = bit / 8 % body.len();
        body[at] ^= 1 << (bit % 8);
        let batch = forge(|h| *h = header, &body);
        if let Ok(records) = BatchView::parse(batch).unwrap().records() {
            prop_assert!(records.count() <= 3);
        }
    }
}
