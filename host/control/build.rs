//! Writes the gRPC glue of the one service. The messages are declared in Rust (`src/wire.rs`), so nobody needs protoc to build this;
//! `control.proto` says the same for other languages.

fn main() {
    let converse = tonic_build::manual::Method::builder()
        .name("converse")
        .route_name("Converse")
        .comment("One connection of one session: packets both ways, in order.")
        .input_type("crate::wire::Packet")
        .output_type("crate::wire::Packet")
        .codec_path("tonic_prost::ProstCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let control =
        tonic_build::manual::Service::builder().name("Control").package("penstock.control.v1").method(converse).build();
    tonic_build::manual::Builder::new().compile(&[control]);
    println!("cargo:rerun-if-changed=build.rs");
}
