//! The sections of a cluster: who this process is in it, where workers are found, how prompts are handed off.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Who this process is among others, and how they reach each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ClusterConfig {
    /// Name of this gateway or worker, the same over restarts; from the host and the port when absent.
    pub name: Option<String>,
    /// What `penstock worker` does for requests.
    pub role: WorkerRole,
    /// Number of the worker's replica; 0 is one made from the name.
    pub replica_id: u32,
    /// Where a worker listens for gateways. Loopback unless told.
    pub control_listen: SocketAddr,
    /// `HOST:PORT` by which gateways reach it; where it listens when absent.
    pub control_advertise: Option<String>,
    /// File with the token that gateways and workers show each other; needed away from loopback.
    pub token_file: Option<PathBuf>,
    /// Where workers make themselves known.
    pub discovery: DiscoveryAt,
    /// Workers that a gateway knows without discovery, `HOST:PORT` each.
    pub workers: Vec<String>,
    /// Most workers that a gateway takes.
    pub workers_max: usize,
    /// Most gateways that a worker takes.
    pub gateways_max: usize,
    /// The tenants' quotas hold for all gateways of this discovery together.
    pub share_quotas: bool,
    /// What workers cache is heard by their KV events, where they publish them, and not over the control connection.
    pub follow_kv_events: bool,
    /// Part of each quota that a gateway gives out while it does not know its share, in parts per million.
    pub quota_floor_ppm: u32,
    /// A control session without a connection is over after this.
    pub session_lease_ms: u64,
    /// Longest pause before a worker that could not be reached is called again.
    pub redial_ms: u64,
    /// Where the process stands, `NAME=VALUE` each.
    pub labels: Vec<String>,
    /// Workers with equal values of this label are near each other.
    pub near_label: String,
    /// How much it matters for a hand-off that both ends are near.
    pub near: Near,
}

/// What a worker does for requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum WorkerRole {
    /// Whole requests.
    #[default]
    Unified,
    /// Prompts, for workers that decode.
    Prefill,
    /// What others have prefilled, and whole requests where nothing was.
    Decode,
}

/// How much it matters that both ends of a hand-off are near each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Near {
    /// It does not.
    #[default]
    Any,
    /// A near pair goes before a better ranked one.
    Preferred,
    /// Only a near pair hands off; without one the request takes the whole path.
    Required,
}

/// Where workers make themselves known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DiscoveryAt {
    /// Nowhere outside this process: gateways are told their workers one by one.
    #[default]
    Memory,
    /// In a folder that all see.
    Folder(PathBuf),
    /// In etcd, by the addresses of its servers.
    Etcd(Vec<String>),
    /// In the annotations of pods.
    Kubernetes,
}

impl FromStr for DiscoveryAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let said = |part: &str| !part.trim().is_empty();
        match text.split_once(':').unwrap_or((text, "")) {
            ("memory", "") => Ok(Self::Memory),
            ("kubernetes", "") => Ok(Self::Kubernetes),
            ("folder", path) if said(path) => Ok(Self::Folder(path.into())),
            ("etcd", servers) if servers.split(',').all(said) => {
                Ok(Self::Etcd(servers.split(',').map(|server| server.trim().to_owned()).collect()))
            }
            _ => Err(format!(
                "`{text}`: memory, folder:PATH, etcd:http://HOST:PORT (several with commas between), or kubernetes"
            )),
        }
    }
}

impl TryFrom<String> for DiscoveryAt {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for DiscoveryAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Folder(path) => write!(f, "folder:{}", path.display()),
            Self::Etcd(servers) => write!(f, "etcd:{}", servers.join(",")),
            Self::Kubernetes => f.write_str("kubernetes"),
        }
    }
}

impl From<DiscoveryAt> for String {
    fn from(at: DiscoveryAt) -> Self {
        at.to_string()
    }
}

/// How discovery is asked, whichever it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiscoveryConfig {
    /// How long a worker stays known without a renewal.
    pub lease_ms: u64,
    /// Begin of all keys in etcd.
    pub etcd_prefix: String,
    /// User in etcd, where it has authentication on.
    pub etcd_user: Option<String>,
    /// File with that user's password.
    pub etcd_password_file: Option<PathBuf>,
    /// `https://HOST:PORT` of the API server; what a pod finds in its environment when absent.
    pub kubernetes_server: Option<String>,
    /// Namespace of the pods; this pod's when absent.
    pub kubernetes_namespace: Option<String>,
    /// Which pods.
    pub kubernetes_selector: String,
    /// File with the service account's token; the mounted one when absent.
    pub kubernetes_token_file: Option<PathBuf>,
    /// Authorities that the service's certificate is checked against, PEM.
    pub tls_authorities_file: Option<PathBuf>,
    /// Own certificate, PEM.
    pub tls_certificate_file: Option<PathBuf>,
    /// Its key, PEM.
    pub tls_key_file: Option<PathBuf>,
}

/// Patience of a hand-off. All parties of a cluster have the same leases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HandoffSection {
    /// Between two repetitions of what was not answered.
    pub repeat_ms: u64,
    /// Gateway: for the promise of whoever is to decode.
    pub reserve_ms: u64,
    /// Gateway: for the answer of whoever is to prefill.
    pub open_ms: u64,
    /// Both workers: for the first word of the other one.
    pub bootstrap_ms: u64,
    /// Decoding worker: for the next new chunk.
    pub waiting_ms: u64,
    /// Gateway: for the whole.
    pub transfer_ms: u64,
    /// Gateway: for the answer of the worker that is to take the request.
    pub settle_ms: u64,
    /// A worker keeps a transfer so long without hearing from the gateway.
    pub hold_lease_ms: u64,
    /// A prefilling worker may write so long without hearing from the other one.
    pub write_lease_ms: u64,
    /// Longest time that a write once posted is under way.
    pub grace_ms: u64,
    /// Hand-offs of one gateway at once.
    pub transfers_max: u32,
    /// What becomes of a request whose hand-off does not come about.
    pub fallback: FallbackTo,
}

/// What becomes of a request whose hand-off does not come about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum FallbackTo {
    /// It is decoded where it was prefilled, if that is possible; else computed anew.
    #[default]
    Sender,
    /// It is computed anew.
    Anew,
    /// It ends with an error that may be retried.
    Never,
}

/// How KV travels between workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransferConfig {
    /// Ways that may be used, the preferred first; empty is all that are there, in the order of their speed.
    pub kinds: Vec<TransferKind>,
    /// Where the worker listens for KV by TCP; port 0 takes a free one.
    pub tcp_listen: SocketAddr,
    /// Address that others are told; where it listens when absent.
    pub tcp_advertise: Option<SocketAddr>,
    /// Folder of the socket by which processes of one host share memory; one of this user when absent.
    pub memfd_dir: Option<PathBuf>,
    /// Where NIXL is greeted; port 0 takes a free one.
    pub nixl_listen: SocketAddr,
    /// Address that others are told of it; where it is greeted when absent.
    pub nixl_advertise: Option<SocketAddr>,
    /// Folder that has NIXL's library; where the system's loader looks when absent.
    pub nixl_library_dir: Option<PathBuf>,
    /// Which of NIXL's plugins moves the bytes.
    pub nixl_plugin: String,
    /// Parameters of that plugin, `NAME=VALUE` each.
    pub nixl_parameters: Vec<String>,
    /// Variables that NIXL and UCX read when they are loaded, `NAME=VALUE` each, over those that are set for them anyway.
    pub nixl_environment: Vec<String>,
}

/// One way for KV to travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum TransferKind {
    /// Memory that two processes of one host share.
    Memfd,
    /// NVIDIA's transfer library, where it is there.
    Nixl,
    /// A TCP connection.
    Tcp,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            name: None,
            role: WorkerRole::Unified,
            replica_id: 0,
            control_listen: SocketAddr::from(([127, 0, 0, 1], 8200)),
            control_advertise: None,
            token_file: None,
            discovery: DiscoveryAt::Memory,
            workers: Vec::new(),
            workers_max: 64,
            gateways_max: 8,
            share_quotas: false,
            quota_floor_ppm: 0,
            follow_kv_events: false,
            session_lease_ms: 10_000,
            redial_ms: 2_000,
            labels: Vec::new(),
            near_label: "host".to_owned(),
            near: Near::Any,
        }
    }
}

impl Default for DiscoveryConfig {
    fn default() -> Self {
        Self {
            lease_ms: 10_000,
            etcd_prefix: "/penstock/workers/".to_owned(),
            etcd_user: None,
            etcd_password_file: None,
            kubernetes_server: None,
            kubernetes_namespace: None,
            kubernetes_selector: "llm-d.ai/inferenceServing=true".to_owned(),
            kubernetes_token_file: None,
            tls_authorities_file: None,
            tls_certificate_file: None,
            tls_key_file: None,
        }
    }
}

impl Default for HandoffSection {
    fn default() -> Self {
        let penstock_sched::gateway::HandoffConfig { timing, leases, transfers, .. } = Default::default();
        Self {
            repeat_ms: timing.repeat.as_ms(),
            reserve_ms: timing.reserve.as_ms(),
            open_ms: timing.open.as_ms(),
            bootstrap_ms: timing.bootstrap.as_ms(),
            waiting_ms: timing.waiting.as_ms(),
            transfer_ms: timing.transfer.as_ms(),
            settle_ms: timing.settle.as_ms(),
            hold_lease_ms: leases.hold.as_ms(),
            write_lease_ms: leases.write.as_ms(),
            grace_ms: leases.grace.as_ms(),
            transfers_max: transfers,
            fallback: FallbackTo::Sender,
        }
    }
}

impl Default for TransferConfig {
    fn default() -> Self {
        Self {
            kinds: Vec::new(),
            tcp_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            tcp_advertise: None,
            memfd_dir: None,
            nixl_listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            nixl_advertise: None,
            nixl_library_dir: None,
            nixl_plugin: "UCX".to_owned(),
            nixl_parameters: Vec::new(),
            nixl_environment: Vec::new(),
        }
    }
}

/// `NAME=VALUE`, in its parts.
pub fn pair(text: &str) -> Option<(&str, &str)> {
    text.split_once('=').filter(|(name, value)| !name.is_empty() && !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discovery_is_named_in_one_word() {
        let read = |text: &str| text.parse::<DiscoveryAt>();
        assert_eq!(read("memory"), Ok(DiscoveryAt::Memory));
        assert_eq!(read("kubernetes"), Ok(DiscoveryAt::Kubernetes));
        assert_eq!(read("folder:/mnt/a:b"), Ok(DiscoveryAt::Folder("/mnt/a:b".into())));
        let two = vec!["http://10.0.0.1:2379".to_owned(), "http://10.0.0.2:2379".to_owned()];
        assert_eq!(read("etcd:http://10.0.0.1:2379, http://10.0.0.2:2379"), Ok(DiscoveryAt::Etcd(two)));
        for wrong in ["", "consul", "etcd:", "etcd:http://a:1,", "folder:", "memory:1", "kubernetes:x"] {
            let why = read(wrong).unwrap_err();
            assert!(why.contains("folder:PATH") && why.contains(wrong), "{why}");
        }
        for text in ["memory", "kubernetes", "folder:/mnt/a", "etcd:http://a:1,http://b:2"] {
            assert_eq!(read(text).unwrap().to_string(), text);
        }
    }
}
