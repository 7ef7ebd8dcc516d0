//! A real etcd of the test's own on loopback, which can be killed and started again.

use std::env;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::PATIENCE;

pub struct EtcdServer {
    program: PathBuf,
    data: TempDir,
    client: u16,
    peer: u16,
    child: Option<Child>,
    is_tls: bool,
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// `PENSTOCK_ETCD`, what `cargo xtask etcd` fetched, or one on the path.
fn program() -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("etcd").join("usr/bin/etcd");
    let named = env::var_os("PENSTOCK_ETCD").map(PathBuf::from);
    let on_path = env::var_os("PATH").into_iter().flat_map(|path| env::split_paths(&path).collect::<Vec<_>>());
    let candidates = named.into_iter().chain([fetched]).chain(on_path.map(|dir| dir.join("etcd")));
    candidates.into_iter().find(|path| path.is_file())
}

pub fn tls_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tls").join(name)
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl EtcdServer {
    pub fn start() -> Option<Self> {
        Self::start_as(false)
    }

    /// One that speaks TLS, and only to clients with a certificate.
    pub fn start_tls() -> Option<Self> {
        Self::start_as(true)
    }

    fn start_as(is_tls: bool) -> Option<Self> {
        let Some(program) = program() else {
            println!("SKIPPED etcd: there is no etcd; `cargo xtask etcd` fetches one on Debian, or set PENSTOCK_ETCD");
            return None;
        };
        let (client, peer) = (free_port(), free_port());
        let mut server = Self { program, data: tempfile::tempdir().unwrap(), client, peer, child: None, is_tls };
        server.run();
        Some(server)
    }

    pub fn address(&self) -> String {
        format!("{}://127.0.0.1:{}", if self.is_tls { "https" } else { "http" }, self.client)
    }

    /// As `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub fn wipe(&mut self) {
        self.data = tempfile::tempdir().unwrap();
    }

    pub fn run(&mut self) {
        let client = self.address();
        let peer = format!("http://127.0.0.1:{}", self.peer);
        let mut command = Command::new(&self.program);
        command
            .arg("--data-dir")
            .arg(self.data.path())
            .args(["--name", "default", "--logger", "zap", "--log-level", "error"])
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("default={peer}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if self.is_tls {
            for (option, file) in [
                ("--cert-file", "server.pem"),
                ("--key-file", "server.key.pem"),
                ("--trusted-ca-file", "authority.pem"),
            ] {
                command.arg(option).arg(tls_file(file));
            }
            command.arg("--client-cert-auth");
        }
        self.child = Some(command.spawn().unwrap());
        let give_up = Instant::now() + PATIENCE;
        let is_up = || match self.is_tls {
            // Asking by hand is for plain ones.
            true => TcpStream::connect(("127.0.0.1", self.client)).is_ok(),
            false => self.try_post("/v3/kv/range", r#"{"key":"AA=="}"#).is_ok_and(|answer| answer.contains("revision")),
        };
        while !is_up() {
            assert!(Instant::now() < give_up, "etcd does not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Asks it by hand, apart from the code under test.
    pub fn post(&self, path: &str, body: &str) -> String {
        self.try_post(path, body).unwrap()
    }

    fn try_post(&self, path: &str, body: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.client))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let length = body.len();
        let head =
            format!("POST {path} HTTP/1.1\r\nHost: etcd\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes())?;
        stream.write_all(body.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}
