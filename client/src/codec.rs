//! [`Codec`]: how a program's values become the bytes of keys and values, and back.

use std::fmt;

use bytes::Bytes;

/// Why a codec fails; any error of the program's.
pub type CodecError = Box<dyn std::error::Error + Send + Sync>;

/// Turns values of one type into bytes and back.
///
/// Absent keys and values never reach a codec: they are `None` on both sides. A type may have many
/// codecs and a codec many types.
///
/// ```
/// use bytes::Bytes;
/// use qute_client::{Codec, CodecError};
///
/// /// A count as eight bytes, most significant first.
/// struct BigEndian;
///
/// impl Codec<u64> for BigEndian {
///     fn encode(&self, value: &u64) -> Result<Bytes, CodecError> {
///         Ok(Bytes::copy_from_slice(&value.to_be_bytes()))
///     }
///
///     fn decode(&self, bytes: &Bytes) -> Result<u64, CodecError> {
///         Ok(u64::from_be_bytes(bytes[..].try_into()?))
///     }
/// }
///
/// assert_eq!(BigEndian.decode(&BigEndian.encode(&7)?)?, 7);
/// # Ok::<(), CodecError>(())
/// ```
pub trait Codec<T>: Send + Sync + 'static {
    /// The bytes of a value.
    ///
    /// # Errors
    /// The record is not taken in: [`crate::ErrorKind::Serde`], not written, with this error as its
    /// source.
    fn encode(&self, value: &T) -> Result<Bytes, CodecError>;

    /// The value of bytes. `bytes` share the memory of their batch: a value that keeps a part of
    /// them without copying keeps the batch.
    ///
    /// # Errors
    /// The program gets [`crate::ErrorKind::Serde`] in place of the record, with this error as its
    /// source and the record in [`crate::Error::record`]; reading goes on behind it.
    fn decode(&self, bytes: &Bytes) -> Result<T, CodecError>;
}

/// Bytes as they are, without copying.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BytesCodec;

impl Codec<Bytes> for BytesCodec {
    fn encode(&self, value: &Bytes) -> Result<Bytes, CodecError> {
        Ok(value.clone())
    }

    fn decode(&self, bytes: &Bytes) -> Result<Bytes, CodecError> {
        Ok(bytes.clone())
    }
}

impl Codec<Vec<u8>> for BytesCodec {
    fn encode(&self, value: &Vec<u8>) -> Result<Bytes, CodecError> {
        Ok(Bytes::copy_from_slice(value))
    }

    fn decode(&self, bytes: &Bytes) -> Result<Vec<u8>, CodecError> {
        Ok(bytes.to_vec())
    }
}

/// Text. Bytes that are not UTF-8 do not decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Utf8Codec;

impl Codec<String> for Utf8Codec {
    fn encode(&self, value: &String) -> Result<Bytes, CodecError> {
        Ok(Bytes::copy_from_slice(value.as_bytes()))
    }

    fn decode(&self, bytes: &Bytes) -> Result<String, CodecError> {
        Ok(std::str::from_utf8(bytes)?.to_owned())
    }
}

/// JSON, by `serde`, for every type that can be written and read so. (Feature `json`.)
///
/// An absent value is not JSON's `null`: `Option<T>` has both, one inside the other.
#[cfg(feature = "json")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JsonCodec;

#[cfg(feature = "json")]
impl<T: serde::Serialize + serde::de::DeserializeOwned> Codec<T> for JsonCodec {
    fn encode(&self, value: &T) -> Result<Bytes, CodecError> {
        Ok(serde_json::to_vec(value)?.into())
    }

    fn decode(&self, bytes: &Bytes) -> Result<T, CodecError> {
        Ok(serde_json::from_slice(bytes)?)
    }
}

/// Which part of a record a codec failed on, for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Part {
    Key,
    Value,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Key => "key",
            Self::Value => "value",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codecs_give_back_what_they_took() {
        let bytes = Bytes::from_static(&[0, 255]);
        let encoded = BytesCodec.encode(&bytes).unwrap();
        let decoded: Bytes = BytesCodec.decode(&encoded).unwrap();
        assert_eq!(decoded, bytes);
        assert_eq!(decoded.as_ptr(), bytes.as_ptr(), "not copied");
        let decoded: Vec<u8> = BytesCodec.decode(&encoded).unwrap();
        assert_eq!(decoded, [0, 255]);
        let text = Utf8Codec.encode(&"héllo".to_owned()).unwrap();
        assert_eq!(Utf8Codec.decode(&text).unwrap(), "héllo");
        assert!(Utf8Codec.decode(&encoded).is_err());
    }

    #[cfg(feature = "json")]
    #[test]
    fn json_codec_tells_null_from_nonsense() {
        let encoded = JsonCodec.encode(&vec![Some(1), None]).unwrap();
        assert_eq!(encoded, "[1,null]");
        let decoded: Vec<Option<u8>> = JsonCodec.decode(&encoded).unwrap();
        assert_eq!(decoded, [Some(1), None]);
        let null = Bytes::from_static(b"null");
        let nothing: Option<u8> = JsonCodec.decode(&null).unwrap();
        assert_eq!(nothing, None);
        let number: Result<u8, _> = JsonCodec.decode(&Bytes::new());
        number.unwrap_err();
    }
}
