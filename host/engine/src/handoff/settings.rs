//! How may KV leave this process, and where is it reached? What an operator says about it, and the endpoints that come of it.

use std::fs::DirBuilder;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_transport::{Kind, Limits, Memfd, PeerId, Region, Setup, Tcp, Transport, TransportError};

/// How long a peer may owe an answer before its connection counts as lost.
const SILENCE_MAX: Duration = Duration::from_secs(5);

/// Ways between the movers of several processes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TransferSettings {
    /// Which transports may be used, the preferred first. Empty: all that are there, in the order of their speed.
    pub kinds: Vec<Kind>,
    /// Where TCP listens. Port 0 is one of the system's choice.
    pub tcp_bind: SocketAddr,
    /// What peers are told instead of that: needed when it listens at all addresses.
    pub tcp_advertise: Option<SocketAddr>,
    /// Folder for the socket of memfd, made for this user alone when it is missing. All processes of one host that are to reach each
    /// other so must see it under this name.
    pub memfd_dir: PathBuf,
    /// For NIXL, in a build that has it.
    pub nixl: NixlTransfer,
}

/// How NIXL is found and set up. See the transport's documentation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NixlTransfer {
    /// Where it is greeted. Port 0 is one of the system's choice.
    pub bind: SocketAddr,
    /// What peers are told instead.
    pub advertise: Option<SocketAddr>,
    /// Folder of `libnixl_capi.so`; none: where the system looks.
    pub library_dir: Option<PathBuf>,
    /// The plugin that moves the bytes.
    pub plugin: String,
    /// Its parameters.
    pub plugin_parameters: Vec<(String, String)>,
    /// What must be in the environment when the library is loaded, over the defaults.
    pub environment: Vec<(String, String)>,
}

impl Default for TransferSettings {
    /// All kinds; TCP and NIXL at the loopback address, so that nobody outside reaches them unless an operator says so.
    fn default() -> Self {
        let anywhere_here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let memfd_dir = match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(dir) => PathBuf::from(dir).join("penstock-kv"),
            // The folder for temporary files is everybody's.
            None => {
                let user = std::fs::metadata("/proc/self").map_or(0, |process| process.uid());
                std::env::temp_dir().join(format!("penstock-kv-{user}"))
            }
        };
        Self {
            kinds: Vec::new(),
            tcp_bind: anywhere_here,
            tcp_advertise: None,
            memfd_dir,
            nixl: NixlTransfer {
                bind: anywhere_here,
                advertise: None,
                library_dir: None,
                plugin: "UCX".to_owned(),
                plugin_parameters: Vec::new(),
                environment: Vec::new(),
            },
        }
    }
}

impl TransferSettings {
    /// Whether this kind may be used.
    pub fn allows(&self, kind: Kind) -> bool {
        self.kinds.is_empty() || self.kinds.contains(&kind)
    }
}

/// Why there is no endpoint.
#[derive(Debug, thiserror::Error)]
pub enum EndpointError {
    /// One that was asked for cannot be had.
    #[error("the transport {kind} cannot be had: {why}")]
    Kind {
        /// Which.
        kind: Kind,
        /// What is in its way.
        why: TransportError,
    },
    /// The folder for memfd's socket cannot be made.
    #[error("the folder {} for memfd's socket cannot be made: {why}", path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        why: std::io::Error,
    },
    /// None of those that are allowed is there.
    #[error("none of the transports that are allowed can be had here, so that no KV would leave or come")]
    None,
}

/// Guarded endpoints over one region, of all kinds that are allowed and can be had between processes. A kind that was asked for by
/// name must be had.
pub(super) fn endpoints(
    settings: &TransferSettings,
    identity: PeerId,
    region: &Region,
) -> Result<Vec<Box<dyn Transport>>, EndpointError> {
    let mut ends: Vec<Box<dyn Transport>> = Vec::new();
    for kind in [Kind::Memfd, Kind::Nixl, Kind::Tcp].into_iter().filter(|kind| settings.allows(*kind)) {
        // As many operations as chunks that a sender has under way for all its transfers.
        let limits = Limits { silence_max: SILENCE_MAX, ops_max: 256, ..Limits::default() };
        let setup = Setup { identity, regions: vec![region.clone()], is_guarded: true, limits };
        let end: Result<Box<dyn Transport>, TransportError> = match kind {
            Kind::Memfd if region.memory().memfd().is_some() => {
                Memfd::bind(setup, &socket(settings, identity)?).map(boxed)
            }
            Kind::Memfd => Err(TransportError::Unavailable("the KV pool is not in a memfd".to_owned())),
            Kind::Tcp => Tcp::bind(setup, settings.tcp_bind, settings.tcp_advertise).map(boxed),
            Kind::Nixl => nixl::endpoint(&settings.nixl, setup),
            Kind::Reference => continue,
        };
        match end {
            Ok(end) => ends.push(end),
            Err(TransportError::Unavailable(why)) if settings.kinds.is_empty() => {
                tracing::info!(%kind, %why, "this way for KV is not there");
            }
            Err(why) => return Err(EndpointError::Kind { kind, why }),
        }
    }
    if ends.is_empty() { Err(EndpointError::None) } else { Ok(ends) }
}

fn boxed<T: Transport + 'static>(end: T) -> Box<dyn Transport> {
    Box::new(end)
}

/// Where memfd listens: a name of its own for each life of each replica.
fn socket(settings: &TransferSettings, identity: PeerId) -> Result<PathBuf, EndpointError> {
    let path = &settings.memfd_dir;
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|why| EndpointError::Folder { path: path.clone(), why })?;
    let prefix = format!("kv-{:x}-", identity.endpoint);
    sweep(path, &prefix);
    Ok(path.join(format!("{prefix}{:x}.sock", identity.epoch)))
}

/// Removes what earlier lives left behind that were killed.
fn sweep(dir: &Path, prefix: &str) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.filter_map(Result::ok).filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
    {
        let answer = UnixStream::connect(entry.path());
        if answer.is_err_and(|fault| fault.kind() == std::io::ErrorKind::ConnectionRefused) {
            // Should it fail, it is swept the next time.
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

#[cfg(feature = "nixl")]
mod nixl {
    use penstock_transport::{Nixl, NixlSettings, Setup, Transport, TransportError};

    use super::NixlTransfer;

    pub(super) fn endpoint(settings: &NixlTransfer, setup: Setup) -> Result<Box<dyn Transport>, TransportError> {
        let NixlTransfer { bind, advertise, library_dir, plugin, plugin_parameters, environment } = settings.clone();
        // What an operator has set stays: the transport compares with the environment, so it is told what is there.
        let mut wanted = NixlSettings::default_environment();
        wanted.retain(|(name, _)| !environment.iter().any(|(other, _)| other == name));
        wanted.extend(environment);
        for (name, value) in &mut wanted {
            if let Ok(there) = std::env::var(&*name) {
                *value = there;
            }
        }
        let settings = NixlSettings { library_dir, plugin, plugin_parameters, environment: wanted };
        Ok(Box::new(Nixl::bind(setup, &settings, bind, advertise)?))
    }
}

#[cfg(not(feature = "nixl"))]
mod nixl {
    use penstock_transport::{Setup, Transport, TransportError};

    use super::NixlTransfer;

    pub(super) fn endpoint(_: &NixlTransfer, _: Setup) -> Result<Box<dyn Transport>, TransportError> {
        Err(TransportError::Unavailable("this build has no NIXL".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ME: PeerId = PeerId { endpoint: 3, epoch: 77 };

    fn kinds(settings: &TransferSettings, region: &Region) -> Vec<Kind> {
        endpoints(settings, ME, region).expect("endpoints").iter().map(|end| end.kind()).collect()
    }

    #[test]
    fn what_can_be_had_is_offered_and_what_was_asked_for_must_be() {
        let dir = std::env::temp_dir().join(format!("penstock-settings-{}", std::process::id()));
        let all = TransferSettings { memfd_dir: dir.clone(), ..TransferSettings::default() };
        let (shared, private) = (Region::shared(64, 4).expect("memory"), Region::private(64, 4).expect("memory"));
        let without_nixl = |mut kinds: Vec<Kind>| {
            kinds.retain(|kind| *kind != Kind::Nixl);
            kinds
        };
        assert_eq!(without_nixl(kinds(&all, &shared)), [Kind::Memfd, Kind::Tcp]);
        assert_eq!(without_nixl(kinds(&all, &private)), [Kind::Tcp]);
        let only = |kind| TransferSettings { kinds: vec![kind], ..all.clone() };
        assert_eq!(kinds(&only(Kind::Tcp), &shared), [Kind::Tcp]);
        let refused = endpoints(&only(Kind::Memfd), ME, &private).err();
        assert!(matches!(refused, Some(EndpointError::Kind { kind: Kind::Memfd, .. })), "{refused:?}");
        let refused = endpoints(&only(Kind::Reference), ME, &shared).err();
        assert!(matches!(refused, Some(EndpointError::None)), "{refused:?}");
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let refused = endpoints(&TransferSettings { tcp_bind: nowhere, ..only(Kind::Tcp) }, ME, &shared).err();
        assert!(matches!(refused, Some(EndpointError::Kind { kind: Kind::Tcp, .. })), "{refused:?}");
        // One that nobody listens to any more is swept away by the next life; one of another replica is not.
        let left = [dir.join("kv-3-1.sock"), dir.join("kv-4-1.sock")];
        for path in &left {
            drop(std::os::unix::net::UnixListener::bind(path).expect("a socket"));
        }
        drop(endpoints(&only(Kind::Memfd), ME, &shared).expect("endpoints"));
        assert_eq!([left[0].exists(), left[1].exists()], [false, true]);
        std::fs::remove_file(&left[1]).expect("it is there");
        // For its user alone.
        use std::os::unix::fs::PermissionsExt as _;
        let mode = std::fs::metadata(&dir).expect("it was made").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        std::fs::remove_dir(&dir).expect("every endpoint takes its socket with it");
    }
}
