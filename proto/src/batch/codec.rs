//! The codecs of a batch's body.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use super::BatchError;

const ZSTD_LEVEL: i32 = 1;
/// No lz4 block grows by more than this factor: a longer claim is a lie and allocates nothing.
const LZ4_RATIO_MAX: usize = 255;

/// How a batch's body is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum Codec {
    /// Not at all.
    #[default]
    None = 0,
    /// One lz4 block, without a size prefix.
    Lz4 = 1,
    /// One zstd frame.
    Zstd = 2,
}

impl Codec {
    /// The codec of a header's number.
    pub(super) fn from_wire(codec: u8) -> Option<Self> {
        match codec {
            0 => Some(Self::None),
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd),
            _ => None,
        }
    }

    /// The number in a header.
    pub(super) fn to_wire(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Lz4 => 1,
            Self::Zstd => 2,
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        })
    }
}

/// A codec's name that is none of `none`, `lz4`, `zstd`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown compression {0:?}: use none, lz4 or zstd")]
pub struct UnknownCodecName(String);

impl FromStr for Codec {
    type Err = UnknownCodecName;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            "lz4" => Ok(Self::Lz4),
            "zstd" => Ok(Self::Zstd),
            _ => Err(UnknownCodecName(text.to_owned())),
        }
    }
}

/// Compresses bodies; keeps its context between them.
#[derive(Default)]
pub(super) struct Compressor {
    zstd: Option<zstd::bulk::Compressor<'static>>,
    out: Vec<u8>,
}

impl Compressor {
    /// The compressed form of `body`, or `None` where compression would not make it smaller.
    pub(super) fn compress(
        &mut self,
        codec: Codec,
        body: &[u8],
    ) -> Result<Option<&[u8]>, BatchError> {
        let failed = BatchError::Compress { codec };
        // One byte less than the body: an output that does not fit is not worth having.
        let room = body.len().saturating_sub(1);
        let written = match codec {
            Codec::None => return Ok(None),
            Codec::Lz4 => {
                let room = lz4_flex::block::get_maximum_output_size(body.len());
                self.out.resize(room, 0);
                lz4_flex::block::compress_into(body, &mut self.out).map_err(|_| failed)?
            }
            Codec::Zstd => {
                if self.zstd.is_none() {
                    self.zstd =
                        Some(zstd::bulk::Compressor::new(ZSTD_LEVEL).map_err(|_| failed.clone())?);
                }
                let Some(zstd) = self.zstd.as_mut() else {
                    return Err(failed);
                };
                self.out
                    .resize(zstd::zstd_safe::compress_bound(body.len()), 0);
                zstd.compress_to_buffer(body, self.out.as_mut_slice())
                    .map_err(|_| failed)?
            }
        };
        Ok(self.out.get(..written).filter(|out| out.len() <= room))
    }
}

thread_local! {
    static ZSTD: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Decompresses `body` into exactly `uncompressed_bytes`, which the caller has capped.
pub(super) fn decompress(
    codec: Codec,
    body: &[u8],
    uncompressed_bytes: usize,
) -> Result<Vec<u8>, BatchError> {
    let failed = BatchError::Decompress { codec };
    let written_of = |out: &mut Vec<u8>| match codec {
        Codec::None => {
            out.copy_from_slice(body);
            Ok(body.len())
        }
        Codec::Lz4 => lz4_flex::block::decompress_into(body, out).map_err(|_| failed.clone()),
        Codec::Zstd => decompress_zstd(body, out).ok_or(failed.clone()),
    };
    let plausible = match codec {
        Codec::None => body.len() == uncompressed_bytes,
        Codec::Lz4 => uncompressed_bytes / LZ4_RATIO_MAX <= body.len(),
        Codec::Zstd => {
            // A frame that states its content size must agree with the header before anything
            // is allocated.
            zstd::zstd_safe::get_frame_content_size(body)
                .ok()
                .flatten()
                .is_none_or(|size| {
                    usize::try_from(size).is_ok_and(|size| size == uncompressed_bytes)
                })
        }
    };
    if !plausible {
        return Err(failed);
    }
    let mut out = vec![0; uncompressed_bytes];
    let written = written_of(&mut out)?;
    if written != uncompressed_bytes {
        return Err(BatchError::LengthMismatch {
            expected: uncompressed_bytes,
            actual: written,
        });
    }
    Ok(out)
}

fn decompress_zstd(body: &[u8], out: &mut Vec<u8>) -> Option<usize> {
    ZSTD.with_borrow_mut(|slot| {
        if slot.is_none() {
            *slot = zstd::bulk::Decompressor::new().ok();
        }
        slot.as_mut()?
            .decompress_to_buffer(body, out.as_mut_slice())
            .ok()
    })
}
