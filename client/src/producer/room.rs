//! A partition's part of the buffer, and what its traffic looks like.

use super::budget::{Closed, Share, Taken};
use super::load::LoadCell;

#[derive(Debug)]
pub(super) struct Room {
    share: Share,
    pub(super) load: LoadCell,
}

impl Room {
    pub(super) fn new(share: Share, load: LoadCell) -> Self {
        Self { share, load }
    }

    /// Takes without waiting; false if somebody else's turn comes first or there is no room.
    pub(super) fn try_take(&self, bytes: usize) -> bool {
        let taken = self.share.try_take(bytes);
        if taken {
            self.load.add_bytes(bytes);
        }
        taken
    }

    /// Takes, waiting for room and turn.
    ///
    /// # Cancel safety
    /// Cancelled, nothing is taken.
    pub(super) async fn take(&self, bytes: usize) -> Result<(), Closed> {
        self.share.take(bytes).await?;
        self.load.add_bytes(bytes);
        Ok(())
    }

    /// Takes from a reservation; false if that is too small.
    pub(super) fn take_from(&self, reserved: &mut Taken, bytes: usize) -> bool {
        let taken = reserved.move_to(&self.share, bytes);
        if taken {
            self.load.add_bytes(bytes);
        }
        taken
    }

    /// Undoes [`Self::take_from`].
    pub(super) fn return_to(&self, reserved: &mut Taken, bytes: usize) {
        self.load.remove_bytes(bytes);
        reserved.move_back(&self.share, bytes);
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.load.remove_bytes(bytes);
        self.share.give_back(bytes);
    }

    pub(super) fn close(&self) {
        self.share.close();
    }
}
