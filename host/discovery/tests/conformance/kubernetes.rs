//! An API server that serves pods as Kubernetes does.

use std::io::Write as _;
use std::time::Duration;

use penstock_discovery::{
    ANNOTATION, Discovery, DiscoveryError, Event, Kubernetes, KubernetesSettings, Registration, Role, Settings,
    Standing, TlsFiles, WorkerState,
};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::time::sleep;

use crate::api_server::ApiServer;
use crate::{Arena, cases, ids, next, next_change, quiet, record, settings, until};

const TOKEN: &str = "the-service-account";

struct Pods {
    server: ApiServer,
    token: NamedTempFile,
    settings: Settings,
}

/// A running pod, from the fixture.
fn pod(name: &str) -> Value {
    let mut pod: Value = serde_json::from_str(include_str!("../fixtures/pod.json")).unwrap();
    pod["metadata"]["name"] = name.into();
    pod
}

fn set_ready(pod: &mut Value, status: &str) {
    let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
    let ready = conditions.iter_mut().find(|condition| condition["type"] == "Ready").unwrap();
    ready["status"] = status.into();
}

impl Pods {
    fn kubernetes(&self) -> KubernetesSettings {
        KubernetesSettings {
            server: self.server.address(),
            namespace: "llm".to_owned(),
            selector: "llm-d.ai/inferenceServing=true".to_owned(),
            tls: TlsFiles::default(),
            token: Some(self.token.path().to_owned()),
            watch_max: Duration::from_secs(60),
        }
    }

    fn edit(&self, name: &str, change: impl FnOnce(&mut Value)) {
        self.server.store.edit(name, |pod| {
            let mut pod = pod.expect("the pod is there");
            change(&mut pod);
            Some(pod)
        });
    }
}

impl Arena for Pods {
    type Service = Kubernetes;

    async fn open(settings: Settings) -> Option<Self> {
        let mut token = NamedTempFile::new().unwrap();
        writeln!(token, "{TOKEN}").unwrap();
        Some(Self { server: ApiServer::start(TOKEN).await, token, settings })
    }

    fn client(&self) -> Kubernetes {
        Kubernetes::new(self.kubernetes(), self.settings).unwrap()
    }

    fn narrow(&self, workers_max: usize) -> Kubernetes {
        Kubernetes::new(self.kubernetes(), Settings { workers_max, ..self.settings }).unwrap()
    }

    async fn host(&self, id: &str) {
        self.server.store.edit(id, |_| Some(pod(id)));
    }

    /// The kubelet finds that nobody answers its probe.
    async fn crash(&self, id: &str, registration: Registration) {
        drop(registration);
        self.edit(id, |pod| set_ready(pod, "False"));
    }

    async fn lose(&mut self) {
        self.server.stop();
    }

    async fn restore(&mut self) {
        self.server.serve().await;
    }
}

cases::suite!(Pods);

/// The record travels in an annotation, and nothing else of the pod is touched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_annotation_is_written() {
    let arena = Pods::open(settings()).await.unwrap();
    arena.host("w-0").await;
    let registration = arena.client().register(record("w-0", 3)).await.unwrap();
    let mut seen = Value::Null;
    arena.edit("w-0", |pod| seen = pod.clone());
    assert_eq!(seen["metadata"]["annotations"]["example.com/other"], "left alone");
    let text = seen["metadata"]["annotations"][ANNOTATION].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap()["epoch"], 3);
    registration.deregister().await.unwrap();
    let mut expected = pod("w-0");
    arena.edit("w-0", |pod| {
        expected["metadata"]["resourceVersion"] = pod["metadata"]["resourceVersion"].clone();
        assert_eq!(*pod, expected);
    });
}

/// A pod that is being deleted drains, whatever its readiness says, until it is gone. One that is not ready comes back when it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_and_deletion_are_followed() {
    let arena = Pods::open(settings()).await.unwrap();
    arena.host("w-0").await;
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![]));
    let _w = arena.client().register(record("w-0", 3)).await.unwrap();
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("w-0", 3).into()));
    arena.edit("w-0", |pod| set_ready(pod, "Unknown"));
    assert_eq!(next_change(&mut watch).await, Event::Left { id: "w-0".parse().unwrap(), epoch: 3 });
    arena.edit("w-0", |pod| set_ready(pod, "True"));
    assert_eq!(next_change(&mut watch).await, Event::Joined(record("w-0", 3).into()));
    arena.edit("w-0", |pod| {
        pod["metadata"]["deletionTimestamp"] = "2026-06-01T12:00:00Z".into();
        pod["metadata"]["deletionGracePeriodSeconds"] = 120.into();
    });
    let mut draining = record("w-0", 3);
    draining.state = WorkerState::Draining;
    assert_eq!(next_change(&mut watch).await, Event::Changed(draining.into()));
    arena.edit("w-0", |pod| set_ready(pod, "False"));
    arena.edit("w-0", |pod| pod["status"]["containerStatuses"][0]["ready"] = false.into());
    arena.server.store.edit("w-0", |_| None);
    assert_eq!(next_change(&mut watch).await, Event::Left { id: "w-0".parse().unwrap(), epoch: 3 });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forgotten_version_has_everything_read_again() {
    let arena = Pods::open(settings()).await.unwrap();
    arena.host("a").await;
    let _a = arena.client().register(record("a", 1)).await.unwrap();
    let kubernetes = KubernetesSettings { watch_max: Duration::from_secs(1), ..arena.kubernetes() };
    let mut watch = Kubernetes::new(kubernetes, settings()).unwrap().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into()]));
    arena.server.store.forget();
    quiet(&mut watch, Duration::from_secs(3)).await;
    arena.host("b").await;
    let _b = arena.client().register(record("b", 1)).await.unwrap();
    assert_eq!(next(&mut watch).await, Event::Joined(record("b", 1).into()));
    assert_eq!(watch.view().stale, None);
}

/// A bookmark moves the version on, so that a watch which is asked anew starts there: its version is not forgotten with the history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bookmarks_are_used() {
    let arena = Pods::open(settings()).await.unwrap();
    arena.host("a").await;
    let _a = arena.client().register(record("a", 1)).await.unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into()]));
    sleep(Duration::from_millis(500)).await;
    arena.server.store.bookmark();
    sleep(Duration::from_millis(500)).await;
    let lists = arena.server.store.lists();
    arena.server.store.end_watches();
    until(|| arena.server.store.watches_from_bookmark() > 0, "a watch from the bookmark").await;
    assert_eq!(arena.server.store.lists(), lists, "nothing is read anew");
    assert_eq!(ids(&watch), ["a"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_contradicts_itself_is_named_and_skipped() {
    let arena = Pods::open(settings()).await.unwrap();
    for id in ["a", "liar", "broken", "other", "both"] {
        arena.host(id).await;
    }
    let _a = arena.client().register(record("a", 1)).await.unwrap();
    let _liar = arena.client().register(record("liar", 1)).await.unwrap();
    arena.edit("liar", |pod| pod["metadata"]["labels"]["llm-d.ai/role"] = "prefill".into());
    arena.edit("broken", |pod| pod["metadata"]["annotations"][ANNOTATION] = "{".into());
    let stolen = String::from_utf8(record("a", 9).encode().unwrap()).unwrap();
    arena.edit("other", |pod| pod["metadata"]["annotations"][ANNOTATION] = stolen.into());
    let mut both = record("both", 1);
    both.role = Role::Unified;
    arena.edit("both", |pod| pod["metadata"]["labels"]["llm-d.ai/role"] = "both".into());
    let _both = arena.client().register(both.clone()).await.unwrap();
    let mut watch = arena.client().watch();
    assert_eq!(next(&mut watch).await, Event::Snapshot(vec![record("a", 1).into(), both.into()]));
    until(|| watch.view().faults.len() == 3, "three faults").await;
    let faults = watch.view().faults;
    assert_eq!(faults.iter().map(|(place, _)| place.as_str()).collect::<Vec<_>>(), ["broken", "liar", "other"]);
    assert!(faults[1].1.contains("says \"prefill\" and its record decode; make them agree"), "{faults:?}");
    assert!(faults[2].1.contains("it is of worker a, and its place belongs to other"), "{faults:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_say_what_to_do() {
    let arena = Pods::open(settings()).await.unwrap();
    let why = arena.client().register(record("nobody", 1)).await.err().unwrap();
    assert!(matches!(why, DiscoveryError::Refused { .. }));
    assert!(why.to_string().contains("a worker's id must be the name of its pod"), "{why}");
    std::fs::write(arena.token.path(), "an old token").unwrap();
    let why = arena.client().register(record("a", 1)).await.err().unwrap();
    assert!(why.to_string().contains("a role with get, list, watch and patch on pods"), "{why}");
    assert!(!why.to_string().contains("an old token"), "{why}");
    let mut watch = arena.client().watch();
    assert!(matches!(next(&mut watch).await, Event::Stale { .. }));
    // The token is read anew for each question.
    std::fs::write(arena.token.path(), TOKEN).unwrap();
    assert!(matches!(next(&mut watch).await, Event::Snapshot(_)));
}

/// A role that is taken away and given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_survived() {
    let arena = Pods::open(settings()).await.unwrap();
    arena.host("a").await;
    let registration = arena.client().register(record("a", 1)).await.unwrap();
    std::fs::write(arena.token.path(), "an old token").unwrap();
    let is_refused = || matches!(registration.standing(), Standing::Interrupted(DiscoveryError::Refused { .. }));
    until(is_refused, "the refusal").await;
    std::fs::write(arena.token.path(), TOKEN).unwrap();
    until(|| registration.standing() == Standing::Announced, "the registration stands again").await;
}

#[test]
fn outside_of_a_cluster_it_says_so() {
    let why = KubernetesSettings::in_cluster(|_| None).err().unwrap().to_string();
    assert!(why.contains("KUBERNETES_SERVICE_HOST is not set: this is not a pod"), "{why}");
    let why = KubernetesSettings::in_cluster(|_| Some("10.0.0.1".to_owned())).err().unwrap().to_string();
    assert!(why.contains("mount the service account"), "{why}");
}

#[test]
fn the_fixture_is_a_pod_and_has_what_the_tests_change() {
    let pod = pod("x");
    assert_eq!(pod["kind"], "Pod");
    assert_eq!(json!(pod["metadata"]["labels"]["llm-d.ai/role"]), "decode");
}
