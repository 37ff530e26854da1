//! The address book: where brokers were last heard to be.
//!
//! Fed by probes in both directions, by what other brokers have heard, and by registrations in
//! `__cluster`. The newest start of a broker wins, so a broker that comes back on another port is
//! found as soon as anybody has heard of it. Hints only: who a broker *is* gets checked when it
//! is talked to (S23).

use std::collections::BTreeMap;

use parking_lot::Mutex;
use qute_proto::ids::BrokerId;
use qute_proto::internal::BrokerAddress;
use tokio::sync::watch;

use super::view::ClusterView;

/// Brokers remembered that are in no cluster view: strangers can't fill the memory.
const HEARD_MAX: usize = 128;

/// Where brokers were last heard to be.
#[derive(Debug)]
pub struct AddressBook {
    own: BrokerId,
    // Short: look-ups and inserts only, never across an await.
    entries: Mutex<BTreeMap<BrokerId, BrokerAddress>>,
    changes: watch::Sender<u64>,
}

impl AddressBook {
    /// An empty book of the broker `own`.
    #[must_use]
    pub fn new(own: BrokerId) -> Self {
        Self {
            own,
            entries: Mutex::default(),
            changes: watch::Sender::new(0),
        }
    }

    /// Rises with each change.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Notes what was heard of a broker; older news and the broker itself are ignored.
    pub fn learn(&self, heard: &BrokerAddress) {
        let id = BrokerId(heard.broker_id);
        if id.0 == 0 || id == self.own || heard.peer_address.is_empty() {
            return;
        }
        let mut entries = self.entries.lock();
        match entries.get(&id) {
            Some(known) if known.boot > heard.boot || known == heard => return,
            None if entries.len() >= HEARD_MAX => return,
            _ => {}
        }
        entries.insert(id, heard.clone());
        drop(entries);
        self.changes.send_modify(|n| *n += 1);
    }

    /// Notes all registrations of the cluster. Members have room whoever else was heard of, and
    /// what a broker has registered in one start stands against what was heard of that start
    /// (S23).
    pub fn learn_members(&self, view: &ClusterView) {
        let mut changed = false;
        let mut entries = self.entries.lock();
        for broker in view.brokers.values().filter(|broker| broker.id != self.own) {
            let registered = broker.as_ref().into();
            let counts = entries
                .get(&broker.id)
                .is_none_or(|known| known.boot <= broker.boot && *known != registered);
            if counts {
                entries.insert(broker.id, registered);
                changed = true;
            }
        }
        drop(entries);
        if changed {
            self.changes.send_modify(|n| *n += 1);
        }
    }

    /// What is known of one broker.
    #[must_use]
    pub fn get(&self, broker: BrokerId) -> Option<BrokerAddress> {
        self.entries.lock().get(&broker).cloned()
    }

    /// Everybody.
    #[must_use]
    pub fn all(&self) -> Vec<BrokerAddress> {
        self.entries.lock().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use qute_proto::ids::ReplicaId;

    use super::*;
    use crate::controller::view::Broker;

    fn at(broker: u64, boot: u64, address: &str) -> BrokerAddress {
        BrokerAddress {
            broker_id: broker,
            boot,
            peer_address: address.to_owned(),
            ..BrokerAddress::default()
        }
    }

    #[test]
    fn newest_start_of_a_broker_wins() {
        let book = AddressBook::new(BrokerId(1));
        let changes = book.changes();
        book.learn(&at(2, 2, "new:1"));
        book.learn(&at(2, 1, "old:1"));
        assert_eq!(book.get(BrokerId(2)).unwrap().peer_address, "new:1");
        assert_eq!(*changes.borrow(), 1);
        book.learn(&at(2, 3, "newer:1"));
        assert_eq!(book.get(BrokerId(2)).unwrap().peer_address, "newer:1");
    }

    // S23
    #[test]
    fn registration_stands_against_what_was_heard_of_the_same_start() {
        let book = AddressBook::new(BrokerId(1));
        let member = Broker {
            id: BrokerId(2),
            name: String::new(),
            client_address: String::new(),
            peer_address: "registered:1".to_owned(),
            gossip_address: String::new(),
            rack: String::new(),
            boot: 2,
            process_id: 0,
            cluster_replica: ReplicaId(2),
            registered: true,
        };
        let view = ClusterView {
            brokers: BTreeMap::from([(member.id, Arc::new(member))]),
            ..ClusterView::default()
        };
        let known = || book.get(BrokerId(2)).unwrap().peer_address;
        book.learn(&at(2, 2, "false:1"));
        book.learn_members(&view);
        assert_eq!(known(), "registered:1");
        let changes = book.changes();
        book.learn_members(&view);
        assert!(!changes.has_changed().unwrap());
        book.learn(&at(2, 3, "restarted:1"));
        book.learn_members(&view);
        assert_eq!(known(), "restarted:1");
    }

    #[test]
    fn nobody_itself_and_the_addressless_are_ignored() {
        let book = AddressBook::new(BrokerId(1));
        book.learn(&at(0, 1, "a:1"));
        book.learn(&at(1, 1, "a:1"));
        book.learn(&at(2, 1, ""));
        assert!(book.all().is_empty());
    }

    #[test]
    fn strangers_do_not_fill_the_memory() {
        let book = AddressBook::new(BrokerId(1));
        for id in 2..1000 {
            book.learn(&at(id, 1, "a:1"));
        }
        assert_eq!(book.all().len(), HEARD_MAX);
    }
}
