//! Offsets and groups from outside of any session: commits, resets, removal.

use qute_proto::internal::groups_command::Command;
use qute_proto::internal::{CommitClaims, RemoveGroup, ResetClaims};
use qute_proto::v1::{self, ErrorCode};

use super::lead::Coordinator;

impl Coordinator {
    /// Commits offsets of claims, or of a group without members.
    ///
    /// # Errors
    /// As [`Coordinator::command`], if the whole was refused; `GROUP_LIMIT`.
    pub async fn commit(
        &self,
        request: v1::CommitOffsetsRequest,
    ) -> Result<Vec<v1::OffsetCommitted>, v1::Error> {
        if request.member_id.is_empty() {
            self.check_group(&request.group)?;
        }
        let partitions = request
            .offsets
            .iter()
            .map(|it| (&*it.topic_id, it.partition));
        self.check_offsets(&request.group, partitions)?;
        let command = Command::Commit(CommitClaims {
            request: Some(request),
        });
        let outcome = self.command(command).await.map(|reply| reply.offsets);
        count(&outcome);
        outcome
    }

    /// Sets or forgets offsets.
    ///
    /// # Errors
    /// As [`Coordinator::command`]; `GROUP_LIMIT`.
    pub async fn reset(&self, request: v1::ResetOffsetsRequest) -> Result<(), v1::Error> {
        let set: Vec<(&[u8], u32)> = request
            .offsets
            .iter()
            .filter(|it| it.offset.is_some())
            .map(|it| (&*it.topic_id, it.partition))
            .collect();
        self.check_offsets(&request.group, set.into_iter())?;
        let command = Command::Reset(ResetClaims {
            request: Some(request),
        });
        self.command(command).await.map(|_| ())
    }

    /// Forgets a group that has no members.
    ///
    /// # Errors
    /// As [`Coordinator::command`].
    pub async fn remove(&self, group: String) -> Result<(), v1::Error> {
        let command = Command::Remove(RemoveGroup { group });
        self.command(command).await.map(|_| ())
    }
}

fn count(outcome: &Result<Vec<v1::OffsetCommitted>, v1::Error>) {
    let is_fenced =
        |code: ErrorCode| matches!(code, ErrorCode::ClaimFenced | ErrorCode::UnknownMember);
    let (mut committed, mut fenced) = (0, 0);
    match outcome {
        Ok(items) => {
            for item in items {
                match &item.error {
                    None => committed += 1,
                    Some(refused) if is_fenced(refused.code()) => fenced += 1,
                    Some(_) => {}
                }
            }
        }
        Err(refused) if is_fenced(refused.code()) => fenced = 1,
        Err(_) => {}
    }
    metrics::counter!("qute_group_commits_total").increment(1);
    metrics::counter!("qute_group_offsets_committed_total").increment(committed);
    metrics::counter!("qute_group_commits_fenced_total").increment(fenced);
}
