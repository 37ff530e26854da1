//! Commands on their way into the log, and the replies that come back.

use bytes::Bytes;
use prost::Message as _;
pub use qute_proto::internal::groups_command::Command;
use qute_proto::internal::{GroupsCommand, GroupsReply, MemberEpoch};
use qute_proto::v1::{self, ErrorCode};

/// What is proposed.
#[must_use]
pub fn encode(command: Command) -> Bytes {
    GroupsCommand {
        command: Some(command),
    }
    .encode_to_vec()
    .into()
}

/// What [`apply`](crate::raft::StateMachine::apply) answered.
///
/// # Errors
/// The bytes are no reply.
pub fn decode_reply(reply: &[u8]) -> Result<GroupsReply, prost::DecodeError> {
    GroupsReply::decode(reply)
}

/// A command that was refused whole: a reply, not an error.
#[derive(Debug, Clone)]
pub struct Refusal {
    code: ErrorCode,
    message: String,
    held_by: Option<MemberEpoch>,
}

impl Refusal {
    pub(super) fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            held_by: None,
        }
    }

    /// Of a stable name that another member has.
    pub(super) fn held_by(mut self, member: MemberEpoch) -> Self {
        self.held_by = Some(member);
        self
    }

    pub(super) fn into_reply(self) -> GroupsReply {
        GroupsReply {
            code: self.code.into(),
            message: self.message,
            offsets: Vec::new(),
            held_by: self.held_by,
        }
    }

    /// Of one item of a command that is carried out for the others.
    pub(super) fn into_item(self) -> v1::OffsetCommitted {
        v1::OffsetCommitted {
            offset: 0,
            error: Some(v1::Error {
                code: self.code.into(),
                message: self.message,
                ..v1::Error::default()
            }),
        }
    }
}

pub(super) fn refuse<T>(code: ErrorCode, message: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::new(code, message))
}
