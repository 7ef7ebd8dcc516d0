//! Endpoints whose bytes NIXL moves. Permission, doorbell, revocation and cancellation go over a TCP connection, with the words that
//! `memfd` uses: so the receiver's word about its blocks is as certain as there.

mod library;
mod settings;
mod station;

use std::io::Write as _;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

pub use self::settings::NixlSettings;
use self::station::Stations;
use super::listener::Listener;
use super::{Carriage, Endpoint};
use crate::{
    Address, Descriptor, Event, Failure, GrantId, Kind, NixlAddress, OpId, PeerId, Setup, Touch, Transfer, Transport,
    TransportError, Watch,
};

/// What NIXL's metadata are written in: those of one minor version are understood by the same minor version, and by no other that is
/// promised. It is the version of the interface that this is built against.
const WIRE: u16 = 0x0105;

/// Moves bytes by NIXL, over RDMA where there is any. It needs the library, which is looked for when the first endpoint is made.
pub struct Nixl(Endpoint);

impl Nixl {
    /// Listens for greetings at `bind`. Peers are told `advertised`, or the bound address when there is none. Finds and loads the
    /// library the first time, which takes about half a second, and registers all regions.
    ///
    /// # Errors
    ///
    /// [`TransportError::Unavailable`] when the library cannot be had, with what was looked for and where, or when it refuses the
    /// settings; [`TransportError::Io`] when the address cannot be bound; and for a setup without regions or with too many.
    pub fn bind(
        setup: Setup,
        settings: &NixlSettings,
        bind: SocketAddr,
        advertised: Option<SocketAddr>,
    ) -> Result<Self, TransportError> {
        library::load(settings)?;
        let (listener, bound) = Listener::tcp(bind)?;
        let control = advertised.unwrap_or(bound);
        if control.ip().is_unspecified() {
            return Err(TransportError::Descriptor("an unspecified address needs another to be advertised"));
        }
        let address = Address::Nixl(NixlAddress { control, wire: WIRE, has_rdma: has_rdma() });
        let mut endpoint = Endpoint::new(setup, Carriage::Posted, listener, address)?;
        let stations = Stations::new(&endpoint.grounds.descriptor, endpoint.grounds.regions.clone(), settings)?;
        endpoint.poster = Some(Box::new(stations));
        Ok(Self(endpoint))
    }
}

transport!(Nixl, Kind::Nixl);

/// Whether the system has an RDMA device.
fn has_rdma() -> bool {
    Path::new("/sys/class/infiniband").read_dir().is_ok_and(|mut devices| devices.next().is_some())
}

/// Ends the process at once, after what was written has gone out. A process that has loaded NIXL should end so once its endpoints
/// are dropped: where libraries of the system for RDMA are loaded beside those that NIXL brings, the ordinary end crashes while it
/// unloads them.
pub fn leave_with_nixl(code: i32) -> ! {
    // Nobody is left to be told if this fails.
    let _ = (std::io::stdout().flush(), std::io::stderr().flush());
    // SAFETY: it ends the process and runs nothing of it.
    unsafe { libc::_exit(code) }
}
