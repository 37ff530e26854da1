//! Little-endian reading and writing of fixed fields, without panics.

/// Reads fields one after another; `None` once the bytes run out.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    /// A u32 length, then so many bytes.
    pub(super) fn sized(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize_of(u64::from(len)))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Appends fields one after another.
pub(super) trait Put {
    fn put_u8_le(&mut self, value: u8);
    fn put_u32_le(&mut self, value: u32);
    fn put_u64_le(&mut self, value: u64);
    fn put_sized(&mut self, bytes: &[u8]);
}

impl Put for Vec<u8> {
    fn put_u8_le(&mut self, value: u8) {
        self.push(value);
    }

    fn put_u32_le(&mut self, value: u32) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_u64_le(&mut self, value: u64) {
        self.extend_from_slice(&value.to_le_bytes());
    }

    fn put_sized(&mut self, bytes: &[u8]) {
        self.put_u32_le(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.extend_from_slice(bytes);
    }
}

/// A length in memory; saturates where an address is narrower than 64 bits.
pub(super) fn usize_of(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// `value` rounded up to a multiple of `to`, a power of two.
pub(super) const fn align_up(value: u64, to: u64) -> u64 {
    (value + (to - 1)) & !(to - 1)
}
