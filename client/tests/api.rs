//! What programs lean on without noticing: handles and errors cross threads.

use qute_client::{
    Client, ClientConfig, ClientStats, Error, Producer, ProducerConfig, Record, Result, Ticket,
    TopicDescription,
};

fn crosses_threads<T: Send + Sync + 'static>() {}

fn is_cheap_to_clone<T: Clone + Send + Sync + 'static>() {}

#[test]
fn public_types_cross_threads() {
    is_cheap_to_clone::<Client>();
    is_cheap_to_clone::<Producer>();
    is_cheap_to_clone::<Error>();
    crosses_threads::<ClientConfig>();
    crosses_threads::<ClientStats>();
    crosses_threads::<ProducerConfig>();
    crosses_threads::<Record>();
    crosses_threads::<Ticket>();
    crosses_threads::<TopicDescription>();
    assert_eq!(size_of::<Error>(), size_of::<usize>());
}

#[test]
fn futures_of_the_client_can_be_spawned() {
    fn spawnable<F: Future + Send + 'static>(_: impl FnOnce(Client) -> F) {}
    spawnable(|client| async move { client.list_topics().await });
    spawnable(|client| async move { client.describe_topic("t").await });
    spawnable(|client| async move { client.delete_topic("t").await });
    spawnable(|client| async move { client.cluster_info().await });
    spawnable(|client| async move { client.wait_for_index(1).await });
    spawnable(|client| async move { client.list_offsets_many(&[]).await });
    spawnable(|client| async move {
        let spec = qute_client::TopicSpec::new("t");
        client.create_topic(spec).await
    });
    spawnable(|client| async move {
        let again: Result<Client> = Client::connect_with(client.config().clone()).await;
        again
    });
}
