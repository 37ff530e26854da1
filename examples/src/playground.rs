//! Where an example plays: the cluster that `QUTE_BOOTSTRAP` names, or one of its own inside this process.

use anyhow::Result;
use qute_client::{Client, TopicId, TopicSpec};
use qute_test::Cluster;

/// A cluster, and a client of it.
pub struct Playground {
    /// A client of the cluster.
    pub client: Client,
    own: Option<Cluster>,
}

impl Playground {
    /// Connects to the cluster that `QUTE_BOOTSTRAP` names, or starts one of a single broker.
    ///
    /// # Errors
    /// Nobody is there, or no broker could be started.
    pub async fn open() -> Result<Self> {
        if std::env::var_os("QUTE_BOOTSTRAP").is_some() {
            let client = Client::from_env().await?;
            return Ok(Self { client, own: None });
        }
        let cluster = Cluster::start(1).await?;
        println!("a broker of our own is at {}", cluster.bootstrap());
        Ok(Self {
            client: cluster.client().await?,
            own: Some(cluster),
        })
    }

    /// A topic that nobody else uses; its name begins like this.
    ///
    /// # Errors
    /// It could not be created.
    pub async fn topic(&self, name: &str, partitions: u32) -> Result<String> {
        let name = unused(name);
        let spec = TopicSpec::new(name.clone()).partitions(partitions);
        self.client.create_topic(spec).await?;
        Ok(name)
    }

    /// Stops the broker, if it is our own.
    pub async fn close(self) {
        if let Some(cluster) = self.own {
            cluster.stop().await;
        }
    }
}

/// A name that nobody else uses and that begins like this.
#[must_use]
pub fn unused(name: &str) -> String {
    let random = TopicId::random().to_string();
    format!("{name}-{}", random.split('-').next().unwrap_or_default())
}
