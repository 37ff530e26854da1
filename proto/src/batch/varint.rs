//! Variable-length integers: LEB128, and zigzag for signed ones.

use bytes::{BufMut, BytesMut};

/// Appends `value`, 7 bits a byte, low bits first.
pub(super) fn put(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(low_byte(value) | 0x80);
        value >>= 7;
    }
    out.put_u8(low_byte(value));
}

/// How many bytes [`put`] writes.
pub(super) fn len(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros();
    // At most 10: the cast can't fail.
    usize::try_from(bits.div_ceil(7)).unwrap_or(10)
}

/// Reads one integer off the front of `input`; `None` if it is cut off or exceeds 64 bits.
pub(super) fn take(input: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = input.split_first()?;
        let bits = u64::from(byte & 0x7f);
        if shift == 63 && bits > 1 {
            return None;
        }
        value |= bits << shift;
        *input = rest;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Small magnitudes, of either sign, become small numbers.
pub(super) fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)).cast_unsigned()
}

/// The inverse of [`zigzag`].
pub(super) fn unzigzag(value: u64) -> i64 {
    (value >> 1).cast_signed() ^ -(value & 1).cast_signed()
}

fn low_byte(value: u64) -> u8 {
    value.to_le_bytes()[0] & 0x7f
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn varint_round_trip_keeps_value_and_length(value: u64) {
            let mut out = BytesMut::new();
            put(&mut out, value);
            prop_assert_eq!(out.len(), len(value));
            let mut input = &out[..];
            prop_assert_eq!(take(&mut input), Some(value));
            prop_assert!(input.is_empty());
        }

        #[test]
        fn zigzag_round_trip_keeps_value(value: i64) {
            prop_assert_eq!(unzigzag(zigzag(value)), value);
        }
    }

    #[test]
    fn varint_cut_off_or_over_64_bits_is_refused() {
        assert_eq!(take(&mut &[][..]), None);
        assert_eq!(take(&mut &[0x80][..]), None);
        assert_eq!(take(&mut &[0xff; 11][..]), None);
        assert_eq!(
            take(&mut &[0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02][..]),
            None
        );
        assert_eq!(
            take(&mut &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01][..]),
            Some(u64::MAX)
        );
    }
}
