//! gRPC messages inside HTTP/2 bodies: a flag byte, a length of four bytes, the message.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Flag and length.
const PREFIX_BYTES: usize = 5;
/// No message of Qute is longer; one that says so is garbage.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// One message as it travels.
#[derive(Clone, Debug)]
pub(crate) struct Message {
    /// 1: compressed, and so not to be looked into.
    flag: u8,
    pub(crate) body: Bytes,
}

impl Message {
    pub(crate) fn plain(body: Bytes) -> Self {
        Self { flag: 0, body }
    }

    /// The body as `M`; `None` if it is compressed or not one.
    pub(crate) fn read<M: prost::Message + Default>(&self) -> Option<M> {
        (self.flag == 0)
            .then(|| M::decode(self.body.clone()).ok())
            .flatten()
    }

    /// The message with its prefix.
    pub(crate) fn encode(&self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + self.body.len());
        bytes.put_u8(self.flag);
        // Bounded by what was read, or made here of a few bytes.
        bytes.put_u32(u32::try_from(self.body.len()).unwrap_or(u32::MAX));
        bytes.put_slice(&self.body);
        bytes.freeze()
    }
}

/// Cuts what arrives into messages.
#[derive(Debug, Default)]
pub(crate) struct Parser {
    bytes: BytesMut,
}

impl Parser {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message, if it is there.
    ///
    /// # Errors
    /// What arrives is no message.
    pub(crate) fn next(&mut self) -> Result<Option<Message>, Garbage> {
        let Some((&[flag, a, b, c, d], _)) = self.bytes.split_first_chunk::<PREFIX_BYTES>() else {
            return Ok(None);
        };
        let length = u32::from_be_bytes([a, b, c, d]);
        let length = usize::try_from(length).map_err(|_| Garbage)?;
        if length > MESSAGE_BYTES_MAX || flag > 1 {
            return Err(Garbage);
        }
        if self.bytes.len() < PREFIX_BYTES + length {
            return Ok(None);
        }
        self.bytes.advance(PREFIX_BYTES);
        let body = self.bytes.split_to(length).freeze();
        Ok(Some(Message { flag, body }))
    }
}

/// What arrived is not gRPC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Garbage;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parser_cuts_messages_wherever_the_bytes_were_split() {
        let bodies = [&b""[..], b"x", &[7; 300]];
        let stream: Vec<u8> = bodies
            .iter()
            .flat_map(|body| Message::plain(Bytes::from_static(body)).encode())
            .collect();
        for step in [1, 2, 6, 1000] {
            let mut parser = Parser::default();
            let mut found = Vec::new();
            for part in stream.chunks(step) {
                parser.push(part);
                while let Some(message) = parser.next().unwrap() {
                    found.push(message.body);
                }
            }
            assert_eq!(found, bodies, "in steps of {step}");
        }
    }

    #[test]
    fn parser_refuses_a_length_beyond_all_messages() {
        let mut parser = Parser::default();
        parser.push(&[0, 0xff, 0, 0, 0]);
        assert!(parser.next().is_err());
    }
}
