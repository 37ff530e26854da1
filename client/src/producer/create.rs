//! Topics that are created because somebody writes to them: one call, however many records wait.

use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::config::TopicTemplate;
use super::intake::Inner;
use crate::client::{Client, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::metadata::Topic;
use crate::net::Backoff;

impl Inner {
    /// Creates the topic, which `missing` says does not exist, and waits until it is known; or gives
    /// `missing` if the settings do not ask for it.
    ///
    /// # Cancel safety
    /// A creation that has begun goes on by itself.
    pub(super) async fn create(
        self: &Arc<Self>,
        name: &Arc<str>,
        deadline: Instant,
        missing: Error,
    ) -> Result<Arc<Topic>> {
        let Some(template) = &self.config.create_topics else {
            return Err(missing);
        };
        let mut creation = {
            let mut creating = self.creating.lock();
            // A creation that has ended meanwhile has shown it to the client before.
            if let Some(topic) = self.shared.metadata.known_topic(name) {
                return Ok(topic);
            }
            match creating.get(name) {
                // One whose task is gone says nothing any more.
                Some(creation) if creation.has_changed().is_ok() => creation.clone(),
                _ => {
                    let (done, creation) = watch::channel(None);
                    creating.insert(Arc::clone(name), creation.clone());
                    self.begin_creation(Arc::clone(name), template.clone(), done);
                    creation
                }
            }
        };
        let ended = match timeout_at(deadline, creation.wait_for(Option::is_some)).await {
            Ok(Ok(ended)) => ended.clone(),
            Ok(Err(_)) => return Err(Error::closed("producer")),
            Err(_) => {
                let message = "the topic was not created in time";
                return Err(Error::new(ErrorKind::Timeout, message).with_topic(name));
            }
        };
        match ended {
            Some(Err(error)) => Err(error),
            _ => self.shared.metadata.known_topic(name).ok_or(missing),
        }
    }

    fn begin_creation(
        self: &Arc<Self>,
        name: Arc<str>,
        template: TopicTemplate,
        done: watch::Sender<Option<Result<()>>>,
    ) {
        let (shared, stop) = (Arc::clone(&self.shared), self.stop.clone());
        let deadline = self.deadline();
        // The handle may be dropped meanwhile: nothing here keeps it.
        let inner = Arc::downgrade(self);
        self.tasks.spawn(async move {
            let creating = create(shared, Arc::clone(&name), template, deadline);
            let Some(ended) = stop.run_until_cancelled(creating).await else {
                return;
            };
            // First: whoever comes from here on begins anew.
            if let Some(inner) = inner.upgrade() {
                inner.creating.lock().remove(&name);
            }
            done.send_replace(Some(ended));
        });
    }
}

/// Makes the topic, or finds that somebody has, and waits until this client's view has it. Leaders
/// are waited for by each partition's driver, for its own part only.
async fn create(
    shared: Arc<Shared>,
    name: Arc<str>,
    template: TopicTemplate,
    deadline: Instant,
) -> Result<()> {
    let name = &name;
    let client = Client { shared };
    let mut backoff = Backoff::new(&client.shared.config);
    loop {
        let limit = deadline.min(Instant::now() + client.shared.config.call_timeout);
        let spec = template.spec(name);
        let error = match client.ask_for_topic(&spec, limit).await {
            Ok(_) => break,
            Err(error) if error.kind() == ErrorKind::TopicExists => break,
            Err(error) => error,
        };
        let until = Instant::now() + backoff.step();
        if !error.is_retriable() || until >= deadline {
            return Err(error.with_topic(name));
        }
        tokio::time::sleep_until(until).await;
    }
    let metadata = &client.shared.metadata;
    loop {
        // A failure shows as a view that does not change.
        let _ = timeout_at(deadline, metadata.refresh()).await;
        if metadata.known_topic(name).is_some() {
            return Ok(());
        }
        let until = Instant::now() + backoff.step();
        if until >= deadline {
            let message = "the topic that was missing did not show in time";
            return Err(Error::new(ErrorKind::Timeout, message).with_topic(name));
        }
        tokio::time::sleep_until(until).await;
    }
}
