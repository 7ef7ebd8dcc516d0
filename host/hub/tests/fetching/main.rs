//! Fetching from a hub of our own: real sockets, broken, slow, lying and refusing servers. Nothing outside this machine is asked.
#![allow(clippy::unwrap_used)]

mod server;

use std::fs;
use std::path::Path;
use std::time::Duration;

use penstock_hub::{Fetched, HubError, Said, Settings, Source, fetch};
use server::{COMMIT, Faults, Server, sha256};

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 251) as u8).collect()
}

/// A repository with a folder model in two shards, and a GGUF file.
fn files() -> Vec<(&'static str, Vec<u8>)> {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "parts/model-2.safetensors"}}"#;
    vec![
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", content(20_000)),
        ("README.md", b"not needed".to_vec()),
        ("model.safetensors.index.json", index.to_vec()),
        ("model-1.safetensors", content(5_000)),
        ("parts/model-2.safetensors", content(7_000)),
        ("gguf/tiny.gguf", content(30_000)),
    ]
}

const GGUF: &str = "hf:OWNER/NAME:gguf/tiny.gguf";

fn source(text: &str) -> Source {
    Source::parse(text).unwrap().unwrap()
}

fn settings(server: &Server, cache: &Path) -> Settings {
    Settings {
        endpoint: server.endpoint(),
        token: Some("hf_secret".to_owned()),
        cache: cache.to_path_buf(),
        is_offline: false,
        silence: Duration::from_millis(700),
        pause: Duration::from_millis(1),
        certificates: None,
    }
}

fn get(text: &str, settings: &Settings) -> Result<Fetched, HubError> {
    fetch(&source(text), settings, &mut |_| {})
}

/// What fetching the GGUF file under these faults says, and how the server was asked for its content.
fn faulty(faults: Faults) -> (Result<Vec<u8>, String>, Vec<Option<String>>) {
    let server = Server::start(&files(), faults);
    let cache = tempfile::tempdir().unwrap();
    let got = get(GGUF, &settings(&server, cache.path()));
    (got.map(|fetched| fs::read(fetched.path).unwrap()).map_err(|why| why.to_string()), server.ranges())
}

#[test]
fn a_folder_arrives_in_the_hubs_own_layout() {
    let server = Server::start(&files(), Faults::default());
    let cache = tempfile::tempdir().unwrap();
    let settings = settings(&server, cache.path());
    let mut lines = Vec::new();
    let fetched = fetch(&source("hf:OWNER/NAME"), &settings, &mut |said| match said {
        Said::Resolved { revision, commit } => lines.push(format!("{revision} is {commit}")),
        Said::Progress { file, done, all } if done == all => lines.push(format!("{file} {all}")),
        Said::Progress { .. } => {}
    })
    .unwrap();
    lines.dedup();
    let wanted = [
        format!("main is {COMMIT}"),
        "config.json 2".to_owned(),
        "tokenizer.json 20000".to_owned(),
        "model.safetensors.index.json 78".to_owned(),
        "model-1.safetensors 5000".to_owned(),
        "parts/model-2.safetensors 7000".to_owned(),
    ];
    assert_eq!(lines, wanted);
    let root = cache.path().join("models--OWNER--NAME");
    assert_eq!(fetched, Fetched { path: root.join("snapshots").join(COMMIT), commit: COMMIT.to_owned() });
    for (name, content) in files() {
        let path = fetched.path.join(name);
        let is_wanted = !name.ends_with(".md") && !name.ends_with(".gguf");
        assert_eq!(fs::read(&path).ok(), is_wanted.then_some(content), "{name}");
    }
    assert_eq!(fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    // Contents lie once, by the hub's name for them; the snapshot links there, also from a folder below.
    let blob = root.join("blobs").join(sha256(&content(7_000)));
    let link = fs::read_link(fetched.path.join("parts/model-2.safetensors")).unwrap();
    assert_eq!(link, Path::new("../../../blobs").join(sha256(&content(7_000))));
    assert_eq!(
        fs::canonicalize(fetched.path.join("parts/model-2.safetensors")).unwrap(),
        fs::canonicalize(blob).unwrap()
    );

    // The token goes to the hub and to nobody else.
    for seen in server.seen() {
        let is_hub = seen.host.starts_with("127.0.0.1");
        assert_eq!(seen.authorization.as_deref(), is_hub.then_some("Bearer hf_secret"), "{seen:?}");
    }
    // A second time the branch is asked for again, and nothing is fetched.
    let before = server.seen().len();
    assert_eq!(get("hf:OWNER/NAME", &settings).unwrap(), fetched);
    assert_eq!(server.seen().len(), before + 1);
    // The commit itself is not even asked for.
    assert_eq!(get(&format!("hf:OWNER/NAME@{COMMIT}"), &settings).unwrap(), fetched);
    assert_eq!(server.seen().len(), before + 1);
}

#[test]
fn a_broken_transfer_goes_on_where_it_stopped() {
    let (got, ranges) = faulty(Faults { cuts: vec![12_345, 0, 1], ..Faults::default() });
    assert_eq!(got.unwrap(), content(30_000));
    let range = |from: usize| Some(format!("bytes={from}-"));
    assert_eq!(ranges, [None, range(12_345), range(12_345), range(12_346)]);
}

#[test]
fn what_an_earlier_process_left_is_used() {
    let server = Server::start(&files(), Faults { cuts: vec![9_000, 0, 0, 0, 0, 0], ..Faults::default() });
    let cache = tempfile::tempdir().unwrap();
    let settings = settings(&server, cache.path());
    let why = get(GGUF, &settings).unwrap_err().to_string();
    assert!(why.contains("broke off after 9000 of 30000 bytes") && why.contains("start again to go on"), "{why}");
    assert_eq!(server.ranges().len(), 6, "one that brought something, five that did not");
    let fetched = get(GGUF, &settings).unwrap();
    assert_eq!(fs::read(fetched.path).unwrap(), content(30_000));
    assert_eq!(server.ranges().last().unwrap().as_deref(), Some("bytes=9000-"));
}

#[test]
fn a_server_without_ranges_starts_over() {
    let (got, ranges) = faulty(Faults { cuts: vec![20_000], no_ranges: true, ..Faults::default() });
    assert_eq!(got.unwrap(), content(30_000));
    assert_eq!(ranges.len(), 2);
}

#[test]
fn a_busy_server_is_asked_again() {
    let (got, ranges) = faulty(Faults { busy: 3, ..Faults::default() });
    assert_eq!(got.unwrap(), content(30_000));
    assert_eq!(ranges.len(), 4);
    let (got, ranges) = faulty(Faults { busy: 100, ..Faults::default() });
    assert!(got.unwrap_err().contains("status 503"));
    assert_eq!(ranges.len(), 5);
}

/// Slow is not broken: a transfer may take longer than the longest silence. A server that stalls is left, and asked to go on.
#[test]
fn slow_servers_are_waited_for_and_silent_ones_are_not() {
    let (got, ranges) = faulty(Faults { slow: Some((Duration::from_millis(30), usize::MAX)), ..Faults::default() });
    assert_eq!(got.unwrap(), content(30_000));
    assert_eq!(ranges, [None], "thirty pieces, each after a pause, in one request");
    let (got, ranges) = faulty(Faults { slow: Some((Duration::ZERO, 16_000)), ..Faults::default() });
    assert_eq!(got.unwrap(), content(30_000));
    assert_eq!(ranges, [None, Some("bytes=16000-".to_owned())]);
}

#[test]
fn a_content_with_another_checksum_is_thrown_away() {
    let server = Server::start(&files(), Faults { changed: true, ..Faults::default() });
    let cache = tempfile::tempdir().unwrap();
    let settings = settings(&server, cache.path());
    let why = get(GGUF, &settings).unwrap_err();
    let HubError::Checksum { file, announced, .. } = &why else { panic!("{why}") };
    assert_eq!((file.as_str(), announced), ("gguf/tiny.gguf", &sha256(&content(30_000))));
    let blobs = fs::read_dir(cache.path().join("models--OWNER--NAME/blobs")).unwrap();
    assert_eq!(blobs.count(), 0, "neither a content nor a part of one stays");
}

/// Bytes that are there from something else are noticed by the checksum, and do not stay.
#[test]
fn a_wrong_beginning_is_noticed() {
    let server = Server::start(&files(), Faults::default());
    let cache = tempfile::tempdir().unwrap();
    let settings = settings(&server, cache.path());
    let partial =
        cache.path().join("models--OWNER--NAME/blobs").join(format!("{}.incomplete", sha256(&content(30_000))));
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    fs::write(&partial, [0; 100]).unwrap();
    assert!(matches!(get(GGUF, &settings), Err(HubError::Checksum { .. })));
    assert!(get(GGUF, &settings).is_ok(), "the next attempt starts anew");
    // More bytes than the file has are no beginning of it.
    let fetched = cache.path().join("models--OWNER--NAME");
    fs::remove_dir_all(&fetched).unwrap();
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    fs::write(&partial, [0; 40_000]).unwrap();
    assert_eq!(fs::read(get(GGUF, &settings).unwrap().path).unwrap(), content(30_000));
}

#[test]
fn a_moved_repository_is_followed() {
    let (got, _) = faulty(Faults { moved: true, ..Faults::default() });
    assert_eq!(got.unwrap(), content(30_000));
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_named() {
    let server = Server::start(&files(), Faults::default());
    let cache = tempfile::tempdir().unwrap();
    let partial =
        cache.path().join("models--OWNER--NAME/blobs").join(format!("{}.incomplete", sha256(&content(30_000))));
    fs::create_dir_all(partial.parent().unwrap()).unwrap();
    // The device that is always full.
    std::os::unix::fs::symlink("/dev/full", &partial).unwrap();
    let why = get(GGUF, &settings(&server, cache.path())).unwrap_err().to_string();
    assert!(why.contains("no space left for gguf/tiny.gguf (30000 bytes)") && why.contains("HF_HOME"), "{why}");
}

#[test]
fn refusals_teach() {
    let says = |status: u16, code: &'static str, token: bool, parts: &[&str]| {
        let server = Server::start(&files(), Faults { status: Some((status, code)), ..Faults::default() });
        let cache = tempfile::tempdir().unwrap();
        let mut settings = settings(&server, cache.path());
        settings.token = settings.token.filter(|_| token);
        let why = get(GGUF, &settings).unwrap_err().to_string();
        assert!(parts.iter().all(|part| why.contains(part)), "{status} {code}: {why} should say {parts:?}");
        assert!(!why.contains("hf_secret"), "the token stays secret");
    };
    says(403, "GatedRepo", true, &["OWNER/NAME is gated", "accept its terms", "HF_TOKEN"]);
    says(401, "GatedRepo", false, &["gated", "HF_TOKEN"]);
    says(401, "RepoNotFound", false, &["has no repository OWNER/NAME", "HF_TOKEN when it is private"]);
    says(401, "", false, &["has no repository OWNER/NAME"]);
    says(401, "", true, &["refused the token", "unset HF_TOKEN"]);
    says(404, "RepoNotFound", true, &["has no repository OWNER/NAME"]);
    says(500, "", true, &["status 500"]);

    let server = Server::start(&files(), Faults::default());
    let cache = tempfile::tempdir().unwrap();
    let settings = settings(&server, cache.path());
    let why = |text: &str| get(text, &settings).unwrap_err().to_string();
    assert!(why("hf:OWNER/NAME@v9").contains("OWNER/NAME has no revision v9"));
    assert!(why("hf:OWNER/OTHER").contains("has no repository OWNER/OTHER"));
    let none = why("hf:OWNER/NAME:none.gguf");
    assert!(
        none.contains("has no file none.gguf")
            && none.contains("hf:OWNER/NAME:FILE")
            && none.contains("gguf/tiny.gguf"),
        "{none}"
    );
    assert!(get("hf:OWNER/NAME@v1/x:gguf/tiny.gguf", &settings).is_ok(), "a tag with a slash");

    let ggufs = Server::start(&[("model.Q4.gguf", content(2_000))], Faults::default());
    let cache = tempfile::tempdir().unwrap();
    let why = get("hf:OWNER/NAME", &self::settings(&ggufs, cache.path())).unwrap_err().to_string();
    assert!(why.contains("has no file config.json") && why.contains("model.Q4.gguf"), "{why}");
}

#[test]
fn an_unreachable_hub_is_named() {
    let server = Server::start(&files(), Faults::default());
    let cache = tempfile::tempdir().unwrap();
    let mut settings = settings(&server, cache.path());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    settings.endpoint = format!("http://{free}");
    let why = get(GGUF, &settings).unwrap_err();
    assert!(matches!(why, HubError::Transport { .. }), "{why}");
}

#[test]
fn offline_the_cache_serves_and_the_network_is_left_alone() {
    let server = Server::start(&files(), Faults::default());
    let cache = tempfile::tempdir().unwrap();
    let online = settings(&server, cache.path());
    let offline = Settings { is_offline: true, ..online.clone() };
    let why = get(GGUF, &offline).unwrap_err().to_string();
    assert!(why.contains("not in the cache") && why.contains("HF_HUB_OFFLINE"), "{why}");
    let fetched = get(GGUF, &online).unwrap();
    let folder = get("hf:OWNER/NAME", &online).unwrap();
    let before = server.seen().len();
    assert_eq!(get(GGUF, &offline).unwrap(), fetched);
    assert_eq!(get("hf:OWNER/NAME@main", &offline).unwrap(), folder);
    // A link whose content was removed is not there.
    fs::remove_file(fs::canonicalize(folder.path.join("model-1.safetensors")).unwrap()).unwrap();
    let why = get("hf:OWNER/NAME", &offline).unwrap_err().to_string();
    assert!(why.contains("model-1.safetensors of hf:OWNER/NAME@main is not in the cache"), "{why}");
    assert_eq!(server.seen().len(), before);
    assert_eq!(get("hf:OWNER/NAME", &online).unwrap(), folder);
    assert!(folder.path.join("model-1.safetensors").is_file());
}

/// Two that want the same content fetch it once.
#[test]
fn two_at_once_fetch_once() {
    let server =
        Server::start(&files(), Faults { slow: Some((Duration::from_millis(5), usize::MAX)), ..Faults::default() });
    let cache = tempfile::tempdir().unwrap();
    let settings = settings(&server, cache.path());
    std::thread::scope(|scope| {
        let both = [0, 1].map(|_| scope.spawn(|| get(GGUF, &settings).unwrap().path));
        for one in both {
            assert_eq!(fs::read(one.join().unwrap()).unwrap(), content(30_000));
        }
    });
    assert_eq!(server.ranges().len(), 1);
}

#[test]
fn names_are_read_and_dangerous_ones_refused() {
    let read = |text: &str| Source::parse(text).map(|source| source.map(|s| (s.repository, s.revision, s.file)));
    let is = |text: &str, repository: &str, revision: &str, file: Option<&str>| {
        let wanted = (repository.to_owned(), revision.to_owned(), file.map(str::to_owned));
        assert_eq!(read(text).unwrap().unwrap(), wanted, "{text}");
    };
    is("hf:a/b", "a/b", "main", None);
    is("hf:a/b@refs/pr/1", "a/b", "refs/pr/1", None);
    is("hf:a/b-1.5_x:q/m.gguf", "a/b-1.5_x", "main", Some("q/m.gguf"));
    is("hf:a/b@v1:m.gguf", "a/b", "v1", Some("m.gguf"));
    assert!(read("/models/x").is_none() && read("demo").is_none());
    for bad in [
        "hf:",
        "hf:a",
        "hf:a/b/c",
        "hf:../b",
        "hf:a/..",
        "hf:a/b@",
        "hf:a/b@../x",
        "hf:a/b@x?y",
        "hf:a/b:",
        "hf:a/b:m.bin",
        "hf:a/b:../m.gguf",
        "hf:a/b:/m.gguf",
        "hf:a b/c",
    ] {
        assert!(matches!(read(bad), Some(Err(HubError::Name { .. }))), "{bad}");
    }
    let pinned = source(GGUF).at(COMMIT);
    assert_eq!(pinned.to_string(), format!("hf:OWNER/NAME@{COMMIT}:gguf/tiny.gguf"));
    assert_eq!(source(&pinned.to_string()), pinned, "what is recorded can be given back");
}

#[test]
fn the_environment_is_read_as_the_hubs_tools_read_it() {
    let home = tempfile::tempdir().unwrap();
    fs::write(home.path().join("token"), "hf_saved\n").unwrap();
    let home = home.path().to_str().unwrap();
    let read = |set: &[(&str, &str)]| {
        let set: Vec<(String, String)> = set.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Settings::from_variables(move |name| set.iter().find(|(known, _)| known == name).map(|(_, v)| v.into()))
    };
    let plain = read(&[("HOME", "/home/x")]).unwrap();
    assert_eq!(
        (plain.endpoint.as_str(), plain.token.as_deref(), plain.is_offline),
        ("https://huggingface.co", None, false)
    );
    assert_eq!(plain.cache, Path::new("/home/x/.cache/huggingface/hub"));
    assert_eq!(read(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/c")]).unwrap().cache, Path::new("/c/huggingface/hub"));
    assert_eq!(read(&[("HF_HOME", home), ("HF_HUB_CACHE", "/k")]).unwrap().cache, Path::new("/k"));
    let all = read(&[("HF_HOME", home), ("HF_ENDPOINT", "http://mirror/"), ("HF_HUB_OFFLINE", "1")]).unwrap();
    assert_eq!(
        (all.endpoint.as_str(), all.token.as_deref(), all.is_offline),
        ("http://mirror", Some("hf_saved"), true)
    );
    assert_eq!(read(&[("HF_HOME", home), ("HF_TOKEN", "hf_x")]).unwrap().token.as_deref(), Some("hf_x"));
    assert_eq!(read(&[("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "true")]).unwrap().token, None);
    assert!(matches!(read(&[]), Err(HubError::NoCache)));
    assert!(!format!("{all:?}").contains("hf_saved"));
}
