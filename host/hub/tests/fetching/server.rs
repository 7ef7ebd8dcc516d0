//! A hub of our own on a real socket, with faults on order.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What goes wrong, or otherwise than plainly.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Connections for contents end after so many bytes of the body; one entry for each request, in order.
    pub cuts: Vec<usize>,
    /// Contents are sent in pieces of 1,000 bytes with this pause between them, and stall for good at the second number.
    pub slow: Option<(Duration, usize)>,
    /// `range` is ignored.
    pub no_ranges: bool,
    /// Contents come with their last byte changed.
    pub changed: bool,
    /// Every answer is this status, with this `x-error-code`.
    pub status: Option<(u16, &'static str)>,
    /// The first so many requests for contents are answered with a 503.
    pub busy: usize,
    /// The repository has moved: its old name leads to the new one.
    pub moved: bool,
}

/// One request as it came in.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    /// Name the client called the server by.
    pub host: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
}

pub struct Server {
    pub address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    stop: Arc<AtomicBool>,
}

struct Repository {
    files: BTreeMap<String, Vec<u8>>,
    address: SocketAddr,
    faults: Mutex<Faults>,
}

impl Server {
    /// Serves `OWNER/NAME` with these files; those over 1,000 bytes are large files, which lie on another host.
    pub fn start(files: &[(&str, Vec<u8>)], faults: Faults) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("is bound");
        let files = files.iter().map(|(name, content)| ((*name).to_owned(), content.clone())).collect();
        let repository = Arc::new(Repository { files, address, faults: Mutex::new(faults) });
        let (seen, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (log, stopped) = (Arc::clone(&seen), Arc::clone(&stop));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let (repository, log) = (Arc::clone(&repository), Arc::clone(&log));
                std::thread::spawn(move || {
                    // A client that leaves in the middle is part of the tests.
                    let _ = repository.answer(stream, &log);
                });
            }
        });
        Self { address, seen, stop }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().expect("no handler panics").clone()
    }

    /// Requests for contents: their ranges, in order.
    pub fn ranges(&self) -> Vec<Option<String>> {
        let contents = |seen: &Seen| seen.method == "GET" && seen.path.starts_with("/cdn/");
        self.seen().iter().filter(|seen| contents(seen)).map(|seen| seen.range.clone()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address);
    }
}

pub fn sha256(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Repository {
    fn answer(&self, stream: TcpStream, log: &Mutex<Vec<Seen>>) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
        let mut words = first.split(' ');
        let (method, path) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or_default().to_owned());
        let mut headers = BTreeMap::new();
        for line in lines {
            let line = line?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
        let header = |name: &str| headers.get(name).cloned();
        let seen = Seen {
            method: method.clone(),
            path: path.clone(),
            host: header("host").unwrap_or_default(),
            range: header("range"),
            authorization: header("authorization"),
        };
        let range = seen.range.clone();
        log.lock().expect("no handler panics").push(seen);
        self.reply(stream, &method, &path, range.as_deref())
    }

    fn reply(&self, mut to: TcpStream, method: &str, path: &str, range: Option<&str>) -> std::io::Result<()> {
        let faults = self.faults.lock().expect("no handler panics").clone();
        if let Some((status, code)) = faults.status {
            let code = if code.is_empty() { String::new() } else { format!("x-error-code: {code}\r\n") };
            return write!(to, "HTTP/1.1 {status} No\r\n{code}content-length: 0\r\nconnection: close\r\n\r\n");
        }
        if path.starts_with("/api/models/OWNER/NAME/revision/") {
            if !path.ends_with("/main") && !path.ends_with("/v1%2Fx") && !path.ends_with(COMMIT) {
                return write!(
                    to,
                    "HTTP/1.1 404 No\r\nx-error-code: RevisionNotFound\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                );
            }
            let names: Vec<String> = self.files.keys().map(|name| format!("{{\"rfilename\":\"{name}\"}}")).collect();
            let body =
                format!("{{\"sha\":\"{COMMIT}\",\"siblings\":[{},{{\"rfilename\":\"../x\"}}]}}", names.join(","));
            return write!(to, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        }
        let home = if faults.moved { "/NEW/NAME" } else { "/OWNER/NAME" };
        if faults.moved && path.starts_with("/OWNER/NAME/") {
            let new = path.replace("/OWNER/NAME", home);
            return write!(
                to,
                "HTTP/1.1 307 Moved\r\nlocation: {new}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            );
        }
        if let Some(file) = path.strip_prefix(&format!("{home}/resolve/{COMMIT}/")) {
            let Some(content) = self.files.get(file) else {
                return write!(
                    to,
                    "HTTP/1.1 404 No\r\nx-error-code: EntryNotFound\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
                );
            };
            let etag = sha256(content);
            if content.len() > 1_000 {
                // Large files lie elsewhere; the same server under another name is another host to the client.
                let elsewhere = format!("http://localhost:{}/cdn/{file}?signature=x", self.address.port());
                return write!(
                    to,
                    "HTTP/1.1 302 Found\r\nlocation: {elsewhere}\r\nx-repo-commit: {COMMIT}\r\nx-linked-etag: \"{etag}\"\r\nx-linked-size: {}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
                    content.len()
                );
            }
            write!(
                to,
                "HTTP/1.1 200 OK\r\netag: W/\"{}\"\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                &etag[..40],
                content.len()
            )?;
            return if method == "HEAD" { Ok(()) } else { to.write_all(content) };
        }
        match path.strip_prefix("/cdn/").and_then(|rest| rest.split('?').next()).and_then(|file| self.files.get(file)) {
            Some(content) => self.content(to, content, range, &faults),
            None => write!(to, "HTTP/1.1 404 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"),
        }
    }

    fn content(&self, mut to: TcpStream, content: &[u8], range: Option<&str>, faults: &Faults) -> std::io::Result<()> {
        if faults.busy > 0 {
            self.faults.lock().expect("no handler panics").busy -= 1;
            return write!(to, "HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
        }
        let mut content = content.to_vec();
        if faults.changed {
            *content.last_mut().expect("is not empty") ^= 1;
        }
        let from = range
            .filter(|_| !faults.no_ranges)
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
        let part = &content[from.unwrap_or(0)..];
        match from {
            None => write!(to, "HTTP/1.1 200 OK\r\n")?,
            Some(from) => write!(
                to,
                "HTTP/1.1 206 Partial\r\ncontent-range: bytes {from}-{}/{}\r\n",
                content.len() - 1,
                content.len()
            )?,
        }
        write!(to, "content-length: {}\r\nconnection: close\r\n\r\n", part.len())?;
        let cut = {
            let mut faults = self.faults.lock().expect("no handler panics");
            if faults.cuts.is_empty() { None } else { Some(faults.cuts.remove(0)) }
        };
        if let Some(cut) = cut {
            return to.write_all(&part[..cut.min(part.len())]);
        }
        let Some((pause, stall)) = faults.slow else { return to.write_all(part) };
        for (number, piece) in part.chunks(1_000).enumerate() {
            if number * 1_000 >= stall {
                // Silent, but not closed: the client must give up by itself.
                std::thread::sleep(Duration::from_secs(5));
                return Ok(());
            }
            to.write_all(piece)?;
            to.flush()?;
            std::thread::sleep(pause);
        }
        Ok(())
    }
}
