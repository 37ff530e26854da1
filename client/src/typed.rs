//! Producers and consumers of one type: a [`Codec`] for values, and one for keys if wanted, around
//! the handles of bytes.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures::Stream;

use crate::codec::{BytesCodec, Codec, CodecError, Part};
use crate::consumer::Consumer;
use crate::error::{Error, ErrorKind, Outcome, Result};
use crate::producer::{Producer, Ticket};
use crate::record::{ConsumedRecord, Record, RecordMetadata};

/// The codecs of values and keys.
struct Codecs<V, K> {
    value: Arc<dyn Codec<V>>,
    key: Arc<dyn Codec<K>>,
}

impl<V, K> Clone for Codecs<V, K> {
    fn clone(&self) -> Self {
        Self {
            value: Arc::clone(&self.value),
            key: Arc::clone(&self.key),
        }
    }
}

impl<V> Codecs<V, Bytes> {
    fn of_values(codec: impl Codec<V>) -> Self {
        Self {
            value: Arc::new(codec),
            key: Arc::new(BytesCodec),
        }
    }
}

/// Writes values of type `V`, with keys of type `K`, to one topic. Cheap to clone.
///
/// Keys are bytes unless [`TypedProducer::keys`] gives them a codec. Where a key or a value is
/// absent, `None` stands for it: a record with a key and no value deletes what the key stood for
/// (a tombstone).
///
/// ```no_run
/// use bytes::Bytes;
/// use qute_client::{Client, ProducerConfig, Utf8Codec};
///
/// # async fn example() -> qute_client::Result<()> {
/// # let client = Client::connect("127.0.0.1:7700").await?;
/// let producer = client.producer(ProducerConfig::default())?;
/// let names = producer.typed("names", Utf8Codec).keys(Utf8Codec);
/// names.send(&"UA".to_owned(), &"United".to_owned()).await?;
/// names.send(&"UA".to_owned(), None).await?;
/// # Ok(())
/// # }
/// ```
pub struct TypedProducer<V, K = Bytes> {
    producer: Producer,
    topic: Arc<str>,
    codecs: Codecs<V, K>,
}

impl Producer {
    /// This producer, writing values of one type to one topic. It stays the same producer: order,
    /// buffer and close are shared.
    #[must_use]
    pub fn typed<V: 'static>(
        &self,
        topic: impl Into<Arc<str>>,
        codec: impl Codec<V>,
    ) -> TypedProducer<V> {
        TypedProducer {
            producer: self.clone(),
            topic: topic.into(),
            codecs: Codecs::of_values(codec),
        }
    }
}

impl<V: 'static, K: 'static> TypedProducer<V, K> {
    /// The same, with keys of another type.
    #[must_use]
    pub fn keys<L: 'static>(self, codec: impl Codec<L>) -> TypedProducer<V, L> {
        TypedProducer {
            producer: self.producer,
            topic: self.topic,
            codecs: Codecs {
                value: self.codecs.value,
                key: Arc::new(codec),
            },
        }
    }

    /// The record of a key and a value, for those that need headers, a timestamp or a partition as
    /// well; to be sent by [`TypedProducer::producer`].
    ///
    /// # Errors
    /// [`ErrorKind::Serde`], not written.
    pub fn record<'a>(
        &self,
        key: impl Into<Option<&'a K>>,
        value: impl Into<Option<&'a V>>,
    ) -> Result<Record> {
        let mut record = Record::to(Arc::clone(&self.topic));
        if let Some(key) = key.into() {
            let encoded = self.codecs.key.encode(key);
            record.key = Some(encoded.map_err(|cause| self.unwritable(Part::Key, cause))?);
        }
        if let Some(value) = value.into() {
            let encoded = self.codecs.value.encode(value);
            record.value = Some(encoded.map_err(|cause| self.unwritable(Part::Value, cause))?);
        }
        Ok(record)
    }

    fn unwritable(&self, part: Part, cause: CodecError) -> Error {
        Error::new(
            ErrorKind::Serde,
            format!("the {part} does not encode: {cause}"),
        )
        .with_topic(&self.topic)
        .with_outcome(Outcome::NotWritten)
        .with_boxed_source(cause)
    }

    /// Writes a record and waits for its acknowledgement; see [`Producer::send`].
    ///
    /// # Errors
    /// [`ErrorKind::Serde`] (not written), and those of [`Producer::send`].
    ///
    /// # Cancel safety
    /// As [`Producer::send`].
    pub async fn send<'a>(
        &self,
        key: impl Into<Option<&'a K>>,
        value: impl Into<Option<&'a V>>,
    ) -> Result<RecordMetadata> {
        let record = self.record(key, value)?;
        self.producer.send(record).await
    }

    /// Takes a record in and gives its ticket; see [`Producer::enqueue`].
    ///
    /// # Errors
    /// [`ErrorKind::Serde`], and those of [`Producer::enqueue`]; not written in each case.
    ///
    /// # Cancel safety
    /// As [`Producer::enqueue`].
    pub async fn enqueue<'a>(
        &self,
        key: impl Into<Option<&'a K>>,
        value: impl Into<Option<&'a V>>,
    ) -> Result<Ticket> {
        let record = self.record(key, value)?;
        self.producer.enqueue(record).await
    }

    /// The producer of bytes that this one writes with: to flush, to close, to send records with
    /// headers.
    #[must_use]
    pub fn producer(&self) -> &Producer {
        &self.producer
    }

    /// The topic that it writes to.
    #[must_use]
    pub fn topic(&self) -> &str {
        &self.topic
    }
}

impl<V, K> Clone for TypedProducer<V, K> {
    fn clone(&self) -> Self {
        Self {
            producer: self.producer.clone(),
            topic: Arc::clone(&self.topic),
            codecs: self.codecs.clone(),
        }
    }
}

impl<V, K> fmt::Debug for TypedProducer<V, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedProducer")
            .field("topic", &self.topic)
            .finish_non_exhaustive()
    }
}

/// A record whose key and value have been decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TypedRecord<V, K = Bytes> {
    /// The key, if it has one.
    pub key: Option<K>,
    /// The value; `None` for a tombstone.
    pub value: Option<V>,
    /// The record as it was read: its place, time, headers and bytes.
    pub raw: ConsumedRecord,
}

/// A stream of decoded records; see [`Consumer::typed`].
///
/// A record that does not decode is an item of kind [`ErrorKind::Serde`] with its topic, partition
/// and offset, the codec's error as source, and the record itself in [`Error::record`]. Its offset
/// counts as read and the stream goes on behind it: whether to stop, to skip it or to send it to a
/// dead-letter topic ([`crate::DeadLetter`]) is the program's choice.
///
/// # Cancel safety
/// Polling loses nothing, as with [`Consumer`].
pub struct TypedConsumer<V, K = Bytes> {
    consumer: Consumer,
    codecs: Codecs<V, K>,
}

impl Consumer {
    /// The same records, with values of one type.
    pub fn typed<V: 'static>(self, codec: impl Codec<V>) -> TypedConsumer<V> {
        TypedConsumer {
            consumer: self,
            codecs: Codecs::of_values(codec),
        }
    }
}

impl<V: 'static, K: 'static> TypedConsumer<V, K> {
    /// The same, with keys of another type.
    #[must_use]
    pub fn keys<L: 'static>(self, codec: impl Codec<L>) -> TypedConsumer<V, L> {
        TypedConsumer {
            consumer: self.consumer,
            codecs: Codecs {
                value: self.codecs.value,
                key: Arc::new(codec),
            },
        }
    }

    /// The consumer of bytes behind it: for its positions and the like.
    #[must_use]
    pub fn consumer(&self) -> &Consumer {
        &self.consumer
    }

    /// The consumer of bytes, to go on with where this one stands.
    #[must_use]
    pub fn into_consumer(self) -> Consumer {
        self.consumer
    }

    fn decode(&self, raw: ConsumedRecord) -> Result<TypedRecord<V, K>> {
        let key = raw.key.as_ref().map(|key| self.codecs.key.decode(key));
        let key = match key.transpose() {
            Ok(key) => key,
            Err(cause) => return Err(unreadable(Part::Key, cause, raw)),
        };
        let value = raw
            .value
            .as_ref()
            .map(|value| self.codecs.value.decode(value));
        match value.transpose() {
            Ok(value) => Ok(TypedRecord { key, value, raw }),
            Err(cause) => Err(unreadable(Part::Value, cause, raw)),
        }
    }
}

fn unreadable(part: Part, cause: CodecError, raw: ConsumedRecord) -> Error {
    Error::new(
        ErrorKind::Serde,
        format!("the {part} does not decode: {cause}"),
    )
    .at(&raw.topic, raw.partition)
    .with_offset(raw.offset)
    .with_boxed_source(cause)
    .with_record(raw)
}

impl<V: 'static, K: 'static> Stream for TypedConsumer<V, K> {
    type Item = Result<TypedRecord<V, K>>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let record = ready!(Pin::new(&mut self.consumer).poll_next(cx));
        Poll::Ready(record.map(|record| self.decode(record?)))
    }
}

impl<V, K> fmt::Debug for TypedConsumer<V, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TypedConsumer")
            .field("consumer", &self.consumer)
            .finish_non_exhaustive()
    }
}
