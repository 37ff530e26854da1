//! Which partition a key belongs to: every client, in every language, must agree.

/// Partition of `key` among `partitions`: `(murmur3_x86_32(key, seed 0) & 0x7fffffff) %
/// partitions`. 0 if there are no partitions.
#[must_use]
pub fn partition_of(key: &[u8], partitions: u32) -> u32 {
    hash_of(key).checked_rem(partitions).unwrap_or(0)
}

/// The non-negative hash that [`partition_of`] divides.
#[must_use]
pub fn hash_of(key: &[u8]) -> u32 {
    murmur3_x86_32(key, 0) & 0x7fff_ffff
}

/// MurmurHash3 x86 32 bit (Austin Appleby, public domain), over a slice instead of a reader.
fn murmur3_x86_32(key: &[u8], seed: u32) -> u32 {
    const C1: u32 = 0xcc9e_2d51;
    const C2: u32 = 0x1b87_3593;
    let scramble = |block: u32| block.wrapping_mul(C1).rotate_left(15).wrapping_mul(C2);

    let (blocks, tail) = key.as_chunks::<4>();
    let mut hash = seed;
    for block in blocks {
        hash ^= scramble(u32::from_le_bytes(*block));
        hash = hash
            .rotate_left(13)
            .wrapping_mul(5)
            .wrapping_add(0xe654_6b64);
    }
    let last = tail
        .iter()
        .rev()
        .fold(0u32, |last, &byte| last << 8 | u32::from(byte));
    hash ^= scramble(last);

    // The algorithm takes the length modulo 2^32.
    let [a, b, c, d, ..] = key.len().to_le_bytes();
    hash ^= u32::from_le_bytes([a, b, c, d]);
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn hash_of_design_vectors_matches() {
        for (key, hash) in [
            ("k1", 2_110_152_746),
            ("k2", 1_479_966_664),
            ("key1", 462_881_061),
            ("", 0),
        ] {
            assert_eq!(hash_of(key.as_bytes()), hash, "{key:?}");
            assert_eq!(partition_of(key.as_bytes(), 6), hash % 6, "{key:?}");
        }
    }

    #[test]
    fn partition_of_no_partitions_is_zero() {
        assert_eq!(partition_of(b"k1", 0), 0);
    }

    proptest! {
        #[test]
        fn murmur3_any_key_agrees_with_the_reference_crate(key: Vec<u8>, seed: u32) {
            let expected = murmur3::murmur3_32(&mut std::io::Cursor::new(&key), seed).unwrap();
            prop_assert_eq!(murmur3_x86_32(&key, seed), expected);
        }
    }
}
