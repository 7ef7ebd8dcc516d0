//! NIXL, where the environment names the folder of its library. `cargo xtask test --only nixl` fetches it and sets what it reads.

use std::net::SocketAddr;
use std::path::PathBuf;

use penstock_transport::{Nixl, NixlSettings, Setup, Transport};

/// Whether it can be tested here; says aloud why not.
pub fn is_there() -> bool {
    // UCX reads its settings from the environment when it is loaded: too late to set them in a process that has threads.
    let missing = ["PENSTOCK_NIXL", "UCX_TLS"].into_iter().find(|name| std::env::var_os(name).is_none());
    if let Some(name) = missing {
        println!("SKIPPED over NIXL: {name} is not set; `cargo xtask test --only nixl` does it");
    }
    missing.is_none()
}

/// Settings for the environment as it is.
pub fn settings() -> NixlSettings {
    let library_dir = std::env::var_os("PENSTOCK_NIXL").map(PathBuf::from);
    NixlSettings { library_dir, environment: Vec::new(), ..NixlSettings::default() }
}

pub fn endpoint(setup: Setup, at: SocketAddr) -> Box<dyn Transport> {
    Box::new(Nixl::bind(setup, &settings(), at, None).unwrap())
}
