//! Where do peers find this endpoint, and how is a peer called?

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};

use super::link::Stream;
use crate::{Address, Gone, NixlAddress, TransportError, sys};

/// A host that vanishes without a word is noticed after about this long, and three tries more.
const KEEPALIVE: Duration = Duration::from_secs(10);

pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    pub(crate) fn tcp(at: SocketAddr) -> Result<(Self, SocketAddr), TransportError> {
        let listener = TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok((Self::Tcp(listener), bound))
    }

    /// Binds the path. A socket that nobody listens to any more is replaced; one that is in use is not.
    pub(crate) fn unix(path: &Path) -> Result<Self, TransportError> {
        let listener = match UnixListener::bind(path) {
            Err(fault) if fault.kind() == io::ErrorKind::AddrInUse && is_abandoned(path) => {
                std::fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        listener.set_nonblocking(true)?;
        Ok(Self::Unix(listener, path.to_owned()))
    }

    pub(crate) fn fd(&self) -> RawFd {
        match self {
            Self::Tcp(listener) => listener.as_raw_fd(),
            Self::Unix(listener, _) => listener.as_raw_fd(),
        }
    }

    /// The next peer at the door. One of another user does not come in.
    pub(crate) fn accept(&self) -> Option<Stream> {
        loop {
            let accepted = match self {
                Self::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
                Self::Unix(listener, _) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
            };
            match accepted {
                Ok(stream) if prepare(&stream).is_ok() && is_same_user(&stream) => return Some(stream),
                Ok(_) => {}
                Err(fault) if fault.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            // Whoever comes next replaces it if this fails.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn is_abandoned(path: &Path) -> bool {
    UnixStream::connect(path).is_err_and(|fault| fault.kind() == io::ErrorKind::ConnectionRefused)
}

/// Whether the other end runs as the same user; over TCP the token alone decides.
pub(crate) fn is_same_user(stream: &Stream) -> bool {
    match stream {
        Stream::Tcp(_) => true,
        Stream::Unix(_) => sys::peer_user(stream.fd()).is_ok_and(|user| user == sys::own_user()),
    }
}

fn prepare(stream: &Stream) -> io::Result<()> {
    match stream {
        Stream::Tcp(stream) => {
            stream.set_nonblocking(true)?;
            stream.set_nodelay(true)?;
            socket2::SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE))
        }
        Stream::Unix(stream) => stream.set_nonblocking(true),
    }
}

/// Calls the peer without waiting for it to answer.
pub(crate) fn dial(address: &Address) -> io::Result<Stream> {
    let (domain, at) = match address {
        Address::Tcp(at) | Address::Nixl(NixlAddress { control: at, .. }) => {
            (Domain::for_address(*at), SockAddr::from(*at))
        }
        Address::Memfd(path) => (Domain::UNIX, SockAddr::unix(path)?),
        _ => return Err(io::Error::other("not the address of a socket")),
    };
    let socket = Socket::new(domain, Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&at) {
        Err(fault) if fault.raw_os_error() != Some(libc::EINPROGRESS) => return Err(fault),
        _ => {}
    }
    let stream = match domain {
        Domain::UNIX => Stream::Unix(std::os::fd::OwnedFd::from(socket).into()),
        _ => Stream::Tcp(socket.into()),
    };
    prepare(&stream)?;
    Ok(stream)
}

/// Whether the peer has answered the call; an error when it never will.
pub(crate) fn has_answered(stream: &Stream) -> Result<bool, Gone> {
    let stream = match stream {
        Stream::Tcp(stream) => stream,
        Stream::Unix(_) => return Ok(true),
    };
    match stream.take_error() {
        Ok(None) => Ok(stream.peer_addr().is_ok()),
        Ok(Some(fault)) | Err(fault) => Err(Gone::Unreachable(fault.to_string())),
    }
}
