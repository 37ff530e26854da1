//! Compiles the `.proto` files with protox: no protoc is needed.

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "qute/v1/common.proto",
        "qute/v1/cluster.proto",
        "qute/v1/groups.proto",
        "qute/v1/log.proto",
        "qute/internal/v1/peer.proto",
        "qute/internal/v1/cluster_state.proto",
        "qute/internal/v1/groups_state.proto",
    ];
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    // For gRPC reflection.
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        // Checkpoints of `__cluster` encode in one order.
        .btree_map(".qute.internal.v1")
        .compile_fds(descriptors)?;
    Ok(())
}
