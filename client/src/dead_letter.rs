//! [`DeadLetter`]: records that could not be handled, set aside with where they came from and why.

use std::fmt::Display;
use std::sync::Arc;

use bytes::Bytes;
use qute_proto::batch::RecordHeader;

use crate::record::{ConsumedRecord, Record};

const TOPIC: &str = "qute-dead-letter-topic";
const PARTITION: &str = "qute-dead-letter-partition";
const OFFSET: &str = "qute-dead-letter-offset";
const ERROR: &str = "qute-dead-letter-error";
const ATTEMPTS: &str = "qute-dead-letter-attempts";
const ERROR_BYTES_MAX: usize = 1024;

/// Makes records for a dead-letter topic: the record that failed, with its key, value, headers and
/// timestamp as they were, and in further headers, as text, where it came from and why it is here.
///
/// | header | holds |
/// | --- | --- |
/// | `qute-dead-letter-topic` | topic that it was read from |
/// | `qute-dead-letter-partition` | its partition there |
/// | `qute-dead-letter-offset` | its offset there |
/// | `qute-dead-letter-error` | the error, at most 1 KiB |
/// | `qute-dead-letter-attempts` | how often it was tried |
///
/// A record that was read from a dead-letter topic and fails once more keeps its first place; the
/// error is the new one, and attempts are added.
///
/// Write the dead letter before the offset of the record counts as done, and it is never lost; a
/// crash in between writes it twice, which its place tells.
///
/// ```no_run
/// use futures::StreamExt;
/// use qute_client::{Client, DeadLetter, ProducerConfig, Utf8Codec};
///
/// # async fn example() -> qute_client::Result<()> {
/// # let client = Client::connect("127.0.0.1:7700").await?;
/// let producer = client.producer(ProducerConfig::default())?;
/// let dead_letter = DeadLetter::to("names-failed");
/// let mut names = client.consumer("names").open().await?.typed::<String>(Utf8Codec);
/// while let Some(name) = names.next().await {
///     match name {
///         Ok(name) => println!("{:?}", name.value),
///         Err(error) => match error.record() {
///             Some(record) => {
///                 producer.send(dead_letter.record(record, &error, 1)).await?;
///             }
///             None => return Err(error),
///         },
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    topic: Arc<str>,
}

/// Where a dead letter came from and why, as its headers tell.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetterOrigin {
    /// The topic that it was first read from.
    pub topic: String,
    /// Its partition there.
    pub partition: u32,
    /// Its offset there.
    pub offset: u64,
    /// The error.
    pub error: String,
    /// How often it was tried.
    pub attempts: u32,
}

impl DeadLetter {
    /// Dead letters for this topic.
    #[must_use]
    pub fn to(topic: impl Into<Arc<str>>) -> Self {
        Self {
            topic: topic.into(),
        }
    }

    /// The dead letter of a record that failed with `error` after so many attempts. It is a little
    /// longer than the record was, and may be too large where that was just not.
    #[must_use]
    pub fn record(&self, failed: &ConsumedRecord, error: &dyn Display, attempts: u32) -> Record {
        let before = failed.dead_letter_origin();
        let earlier = before.as_ref().map_or(0, |origin| origin.attempts);
        let (topic, partition, offset) = match before {
            Some(origin) => (origin.topic, origin.partition, origin.offset),
            None => (failed.topic.to_string(), failed.partition, failed.offset),
        };
        let mut headers = failed.headers.clone();
        let ours = [TOPIC, PARTITION, OFFSET, ERROR, ATTEMPTS];
        headers.retain(|header| !ours.contains(&header.name.as_str()));
        let texts = [
            topic,
            partition.to_string(),
            offset.to_string(),
            shortened(error.to_string()),
            attempts.saturating_add(earlier).to_string(),
        ];
        headers.extend(ours.iter().zip(texts).map(|(&name, text)| RecordHeader {
            name: name.to_owned(),
            value: Some(Bytes::from(text)),
        }));
        Record {
            topic: Arc::clone(&self.topic),
            partition: None,
            key: failed.key.clone(),
            value: failed.value.clone(),
            headers,
            timestamp_ms: Some(failed.timestamp_ms),
        }
    }
}

impl ConsumedRecord {
    /// Of a dead letter: where it came from and why. `None` for other records.
    #[must_use]
    pub fn dead_letter_origin(&self) -> Option<DeadLetterOrigin> {
        let text = |name: &str| {
            let header = self.headers.iter().find(|header| header.name == name)?;
            std::str::from_utf8(header.value.as_deref()?).ok()
        };
        Some(DeadLetterOrigin {
            topic: text(TOPIC)?.to_owned(),
            partition: text(PARTITION)?.parse().ok()?,
            offset: text(OFFSET)?.parse().ok()?,
            error: text(ERROR)?.to_owned(),
            attempts: text(ATTEMPTS)?.parse().ok()?,
        })
    }
}

fn shortened(mut text: String) -> String {
    text.truncate(text.floor_char_boundary(ERROR_BYTES_MAX));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed() -> ConsumedRecord {
        ConsumedRecord {
            topic: "orders".into(),
            partition: 3,
            offset: 41,
            timestamp_ms: 17,
            broker_time_ms: 18,
            key: Some(Bytes::from_static(b"k")),
            value: None,
            headers: vec![RecordHeader {
                name: "mine".to_owned(),
                value: None,
            }],
        }
    }

    /// As it would be read.
    fn read(record: Record) -> ConsumedRecord {
        ConsumedRecord {
            topic: record.topic,
            partition: 0,
            offset: 7,
            timestamp_ms: record.timestamp_ms.unwrap(),
            broker_time_ms: 99,
            key: record.key,
            value: record.value,
            headers: record.headers,
        }
    }

    #[test]
    fn dead_letter_keeps_the_record_and_tells_its_origin() {
        let letter = DeadLetter::to("dead").record(&failed(), &"no such user", 3);
        assert_eq!(&*letter.topic, "dead");
        assert_eq!(letter.key, failed().key);
        assert_eq!(letter.value, None);
        assert_eq!(letter.timestamp_ms, Some(17));
        assert_eq!(letter.headers[0], failed().headers[0]);
        let origin = read(letter).dead_letter_origin().unwrap();
        assert_eq!(
            origin,
            DeadLetterOrigin {
                topic: "orders".to_owned(),
                partition: 3,
                offset: 41,
                error: "no such user".to_owned(),
                attempts: 3,
            }
        );
        assert_eq!(failed().dead_letter_origin(), None);
    }

    #[test]
    fn dead_letter_that_fails_again_keeps_its_origin_and_adds_attempts() {
        let first = read(DeadLetter::to("dead").record(&failed(), &"one", 3));
        let again = DeadLetter::to("dead2").record(&first, &"two", 2);
        assert_eq!(again.headers.len(), 6);
        let origin = read(again).dead_letter_origin().unwrap();
        assert_eq!((origin.topic.as_str(), origin.offset), ("orders", 41));
        assert_eq!((origin.error.as_str(), origin.attempts), ("two", 5));
    }

    #[test]
    fn error_text_is_cut_between_characters() {
        let long = format!("x{}", "é".repeat(1000));
        let letter = read(DeadLetter::to("dead").record(&failed(), &long, 1));
        let error = letter.dead_letter_origin().unwrap().error;
        assert_eq!(error.len(), 1023);
        assert!(long.starts_with(&error));
    }
}
