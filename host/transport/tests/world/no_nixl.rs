//! This build has no NIXL.

use std::net::SocketAddr;

use penstock_transport::{Setup, Transport};

pub fn is_there() -> bool {
    false
}

pub fn endpoint(_: Setup, _: SocketAddr) -> Box<dyn Transport> {
    unreachable!("it is not there")
}
