//! One file's way onto the disk: it goes on after breaks, and is shown only when it is whole and what was announced.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write as _};
use std::path::Path;

use sha2::{Digest as _, Sha256};
use ureq::http::StatusCode;

use crate::cache::{Cache, make_parent};
use crate::error::HubError;
use crate::http::{Announced, Hub, transport};
use crate::settings::Settings;

/// Attempts in a row that bring nothing before a transfer is given up.
const FRUITLESS_MAX: u32 = 5;

/// Bytes read at once.
const PIECE_BYTES: usize = 1 << 18;

/// What is to be fetched.
pub(crate) struct Wanted<'a> {
    pub commit: &'a str,
    pub file: &'a str,
    pub announced: &'a Announced,
}

/// Why one attempt ended before the file's end.
enum Broken {
    /// Another attempt may go on.
    Again(HubError),
    /// No attempt will do better.
    Final(HubError),
}

/// Brings a content into the cache; `progress` is told (bytes there, bytes in all).
pub(crate) fn transfer(
    hub: &Hub<'_>,
    cache: &Cache,
    settings: &Settings,
    wanted: &Wanted<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), HubError> {
    let blob = cache.blob(&wanted.announced.etag);
    make_parent(&blob)?;
    let _lock = cache.lock(&wanted.announced.etag)?;
    // Another process may have brought it meanwhile.
    if blob.is_file() {
        return Ok(());
    }
    let partial = cache.incomplete(&wanted.announced.etag);
    let mut fruitless = 0;
    loop {
        let before = size(&partial);
        match attempt(hub, wanted, &partial, progress) {
            Ok(()) => break,
            Err(Broken::Final(why)) => return Err(why),
            Err(Broken::Again(why)) => {
                fruitless = if size(&partial) > before { 0 } else { fruitless + 1 };
                if fruitless >= FRUITLESS_MAX {
                    return Err(why);
                }
                std::thread::sleep(settings.pause * 2u32.pow(fruitless));
            }
        }
    }
    check(wanted, &partial)?;
    fs::rename(&partial, &blob).map_err(HubError::io("rename", &partial))
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// One request, from what is there to the end or to a break.
fn attempt(
    hub: &Hub<'_>,
    wanted: &Wanted<'_>,
    partial: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Broken> {
    let all = wanted.announced.bytes;
    let mut there = size(partial);
    if there > all {
        // More than the file has: of something else.
        fs::remove_file(partial).map_err(|why| Broken::Final(HubError::io("remove", partial)(why)))?;
        there = 0;
    }
    if there == all && partial.exists() {
        return Ok(());
    }
    let response = hub.content(wanted.commit, wanted.file, there);
    let mut response = response.map_err(|why| Broken::Again(transport(wanted.file, &why)))?;
    let status = response.status();
    if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS {
        let why = format!("the server answered with status {status}");
        return Err(Broken::Again(HubError::Transport { what: wanted.file.to_owned(), why }));
    }
    hub.refusal(&response, wanted.file, Some(wanted.file)).map_err(Broken::Final)?;
    let starts_there = response.headers().get("content-range").and_then(|range| range.to_str().ok());
    let starts_there = starts_there.is_some_and(|range| range.starts_with(&format!("bytes {there}-")));
    let goes_on = there > 0 && status == StatusCode::PARTIAL_CONTENT && starts_there;
    let mut to = open(partial, goes_on).map_err(Broken::Final)?;
    if !goes_on {
        there = 0;
    }
    let mut body = response.body_mut().with_config().limit(u64::MAX).reader();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        progress(there, all);
        let count = match body.read(&mut piece) {
            Ok(count) => count,
            Err(why) if why.kind() == ErrorKind::Interrupted => continue,
            Err(why) => return Err(Broken::Again(broke(wanted, there, &why.to_string()))),
        };
        if count == 0 {
            break;
        }
        if there + count as u64 > all {
            let why = format!("more than the {all} bytes that were announced");
            return Err(Broken::Final(HubError::Answer { what: wanted.file.to_owned(), why }));
        }
        to.write_all(&piece[..count]).map_err(|why| Broken::Final(written(wanted, partial, why)))?;
        there += count as u64;
    }
    if there < all {
        return Err(Broken::Again(broke(wanted, there, "the connection ended")));
    }
    to.sync_all().map_err(|why| Broken::Final(written(wanted, partial, why)))
}

fn open(partial: &Path, goes_on: bool) -> Result<File, HubError> {
    let mut options = OpenOptions::new();
    options.create(true).write(true);
    if goes_on {
        options.append(true)
    } else {
        options.truncate(true)
    };
    options.open(partial).map_err(HubError::io("open", partial))
}

fn broke(wanted: &Wanted<'_>, there: u64, why: &str) -> HubError {
    let why = format!("it broke off after {there} of {} bytes: {why}", wanted.announced.bytes);
    HubError::Transport { what: wanted.file.to_owned(), why }
}

fn written(wanted: &Wanted<'_>, partial: &Path, why: std::io::Error) -> HubError {
    if matches!(why.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
        let folder = partial.parent().unwrap_or(partial).to_path_buf();
        return HubError::NoSpace { file: wanted.file.to_owned(), bytes: wanted.announced.bytes, folder };
    }
    HubError::io("write", partial)(why)
}

/// Holds the content to the announced SHA-256, where the etag is one; a git hash of a small file is not checked beyond its size.
fn check(wanted: &Wanted<'_>, partial: &Path) -> Result<(), HubError> {
    let announced = &wanted.announced.etag;
    if announced.len() != 64 || !announced.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Ok(());
    }
    let mut file = File::open(partial).map_err(HubError::io("open", partial))?;
    let mut hash = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match file.read(&mut piece).map_err(HubError::io("read", partial))? {
            0 => break,
            count => hash.update(&piece[..count]),
        }
    }
    let found: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if found.eq_ignore_ascii_case(announced) {
        return Ok(());
    }
    fs::remove_file(partial).map_err(HubError::io("remove", partial))?;
    Err(HubError::Checksum { file: wanted.file.to_owned(), found, announced: announced.clone() })
}
