//! A real etcd.

use std::time::Duration;

use penstock_discovery::{Discovery, DiscoveryError, Etcd, EtcdSettings, Event, Settings, Standing, TlsFiles};

use crate::etcd_server::{EtcdServer, tls_file};
use crate::{Arena, cases, ids, next, next_change, quiet, record, settings, until};

struct Cluster {
    server: EtcdServer,
    settings: Settings,
}

impl Cluster {
    fn etcd(&self) -> EtcdSettings {
        // The first address leads nowhere: one server of a cluster that is down must not matter.
        let endpoints = vec!["http://127.0.0.1:9".to_owned(), self.server.address()];
        EtcdSettings { endpoints, prefix: "/test/workers/".to_owned(), ..EtcdSettings::default() }
    }
}

impl Arena for Cluster {
    type Service = Etcd;

    async fn open(settings: Settings) -> Option<Self> {
        Some(Self { server: EtcdServer::start()?, settings })
    }

    fn client(&self) -> Etcd {
        Etcd::new(self.etcd(), self.settings).unwrap()
    }

    fn narrow(&self, workers_max: usize) -> Etcd {
        Etcd::new(self.etcd(), Settings { workers_max, ..self.settings }).unwrap()
    }

    async fn lose(&mut self) {
        self.server.kill();
    }

    async fn restore(&mut self) {
        self.server.run();
    }
}

cases::suite!(Cluster);

/// Base 64 of a key below the prefix, worked out by `base64(1)`.
const KEY_GARBAGE: &str = "L3Rlc3Qvd29ya2Vycy9nYXJiYWdl";
const KEY_ELSEWHERE: &str = "L2Vsc2V3aGVyZQ==";

/// The watch starts at a revision that etcd has dropped from its history: everything is read again, and nobody is told of an outage.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_is_overcome() {
    let Some(arena) = Cluster::open(settings()).await else { return };
    let etcd = EtcdSettings { watch_max: Duration::from_millis(500), ..arena.etcd() };
    let client = Etcd::new(etcd, settings()).unwrap();
    let _a = client.register(record("a", 1)).await.unwrap();
    let mut watch = client.watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into()]));
    for _ in 0..20 {
        arena.server.post("/v3/kv/put", &format!(r#"{{"key":"{KEY_ELSEWHERE}","value":"AA=="}}"#));
    }
    let answer = arena.server.post("/v3/kv/range", r#"{"key":"AA=="}"#);
    let revision = answer.split(r#""revision":""#).nth(1).unwrap().split('"').next().unwrap();
    let answer = arena.server.post("/v3/kv/compaction", &format!(r#"{{"revision":"{revision}","physical":true}}"#));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    quiet(&mut watch, Duration::from_secs(2)).await;
    let _b = client.register(record("b", 1)).await.unwrap();
    assert_eq!(next(&mut watch).await, Event::Joined(record("b", 1).into()));
    assert_eq!(watch.view().stale, None);
}

/// A cluster that comes back empty: workers announce themselves again, and watchers never see them leave.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_data_is_written_again() {
    let Some(mut arena) = Cluster::open(settings()).await else { return };
    for _ in 0..20 {
        arena.server.post("/v3/kv/put", &format!(r#"{{"key":"{KEY_ELSEWHERE}","value":"AA=="}}"#));
    }
    let lives = arena.client().register(record("lives", 1)).await.unwrap();
    let dies = arena.client().register(record("dies", 1)).await.unwrap();
    let mut watch = arena.client().watch();
    assert!(matches!(next(&mut watch).await, Event::Snapshot(workers) if workers.len() == 2));
    arena.server.kill();
    drop(dies);
    assert!(matches!(next(&mut watch).await, Event::Stale { .. }));
    arena.server.wipe();
    arena.server.run();
    assert_eq!(next(&mut watch).await, Event::Fresh);
    assert_eq!(next(&mut watch).await, Event::Left { id: "dies".parse().unwrap(), epoch: 1 });
    until(|| lives.standing() == Standing::Announced, "the registration stands again").await;
    assert_eq!(ids(&watch), ["lives"]);
    assert_eq!(watch.try_next(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_are_named_and_skipped() {
    let Some(arena) = Cluster::open(settings()).await else { return };
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![]));
    arena.server.post("/v3/kv/put", &format!(r#"{{"key":"{KEY_GARBAGE}","value":"e30="}}"#));
    arena.server.post("/v3/kv/put", &format!(r#"{{"key":"{KEY_ELSEWHERE}","value":"e30="}}"#));
    let _a = arena.client().register(record("a", 1)).await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("a", 1).into()));
    let faults = watch.view().faults;
    assert_eq!(faults.len(), 1, "{faults:?}");
    assert_eq!(faults[0].0, "garbage");
    assert!(faults[0].1.contains("missing field `v`"), "{faults:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authentication_is_done_and_its_failure_says_what_to_do() {
    let Some(arena) = Cluster::open(settings()).await else { return };
    for (path, body) in [
        ("/v3/auth/user/add", r#"{"name":"root","password":"secret-of-root"}"#),
        ("/v3/auth/role/add", r#"{"name":"root"}"#),
        ("/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("/v3/auth/enable", "{}"),
    ] {
        let answer = arena.server.post(path, body);
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
    }
    // Checking a password takes etcd a while on a busy machine.
    let patient = Settings { lease: Duration::from_secs(10), ..settings() };
    let as_user = |password: Option<&str>| {
        let user = password.map(|password| ("root".to_owned(), password.to_owned()));
        Etcd::new(EtcdSettings { user, ..arena.etcd() }, patient).unwrap()
    };
    let register = async |client: &Etcd, id: &str| {
        let mut answer = client.register(record(id, 1)).await;
        for _ in 0..20 {
            if !matches!(answer, Err(DiscoveryError::Unreachable { .. })) {
                break;
            }
            answer = client.register(record(id, 1)).await;
        }
        answer
    };
    let client = as_user(Some("secret-of-root"));
    let _a = register(&client, "a").await.unwrap();
    let mut watch = client.watch();
    until(|| ids(&watch) == ["a"], "the worker").await;
    assert!(watch.try_next().is_some());
    for (password, remedy) in [(Some("wrong"), "check name and password"), (None, "set name and password")] {
        let why = register(&as_user(password), "b").await.err().unwrap();
        assert!(matches!(why, DiscoveryError::Refused { .. }), "{why:?}");
        assert!(why.to_string().contains(remedy), "{why}");
        assert!(!why.to_string().contains("secret") && !why.to_string().contains("wrong"), "{why}");
    }
}

/// Both ends show a certificate. Without the right authority or without an own certificate nothing is said at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_checked_both_ways() {
    let Some(server) = EtcdServer::start_tls() else { return };
    let with = |authority: &str, own: bool| {
        let own = own.then(|| (tls_file("client.pem"), tls_file("client.key.pem")));
        let tls = TlsFiles { authorities: Some(tls_file(authority)), own };
        let endpoints = vec![server.address()];
        Etcd::new(EtcdSettings { endpoints, tls, ..EtcdSettings::default() }, settings()).unwrap()
    };
    let client = with("authority.pem", true);
    let mut watch = client.watch();
    until(|| watch.view().stale.is_none(), "an etcd").await;
    let _a = client.register(record("a", 1)).await.unwrap();
    until(|| ids(&watch) == ["a"], "the worker").await;
    assert!(watch.try_next().is_some());
    // The client's certificate as an authority is one that has signed nothing.
    for client in [with("client.pem", true), with("authority.pem", false)] {
        let refused = client.register(record("b", 1)).await.err();
        assert!(matches!(refused, Some(DiscoveryError::Unreachable { .. })), "{refused:?}");
    }
    let refused = Etcd::new(
        EtcdSettings {
            endpoints: vec![server.address()],
            tls: TlsFiles { authorities: Some(tls_file("README.md")), own: None },
            ..EtcdSettings::default()
        },
        settings(),
    );
    let why = refused.err().unwrap().to_string();
    assert!(why.contains("holds no certificate; it must be PEM"), "{why}");
}

#[tokio::test]
async fn wrong_settings_are_named() {
    let wrong = |change: fn(&mut EtcdSettings)| {
        let mut etcd = EtcdSettings::default();
        change(&mut etcd);
        Etcd::new(etcd, settings()).err().unwrap().to_string()
    };
    assert!(wrong(|etcd| etcd.endpoints = vec![]).contains("etcd.endpoints: must name one to nine servers"));
    assert!(wrong(|etcd| etcd.endpoints = vec!["localhost:2379".into()]).contains("is not http://HOST:PORT"));
    assert!(wrong(|etcd| etcd.endpoints = vec!["http://u:p@h:1".into()]).contains("is not http://HOST:PORT"));
    assert!(wrong(|etcd| etcd.endpoints = vec!["https://h:1".into()]).contains("the file of the authorities"));
    assert!(wrong(|etcd| etcd.prefix = "/a".into()).contains("etcd.prefix: must end with a slash"));
    let user = EtcdSettings { user: Some(("u".into(), "secret".into())), ..EtcdSettings::default() };
    assert!(!format!("{user:?}").contains("secret"));
}
