//! What is wrong with the sections of a cluster, and with a configuration for the role that is to run with it?

use std::net::IpAddr;
use std::ops::RangeInclusive;

use penstock_base::limits;

use super::Faults;
use super::cluster::{DiscoveryAt, Near, TransferKind, pair};
use super::sections::Config;

/// Longest name: as discovery has it.
const NAME_BYTES_MAX: usize = 200;
/// Most labels: as a record of discovery has them.
const LABELS_MAX: usize = 16;
/// Most bytes of a label's name, and of its value.
const LABEL_BYTES_MAX: usize = 63;
/// Most workers of one gateway, and so most that are named one by one.
const WORKERS_MAX: u64 = penstock_base::limits::REPLICAS_MAX as u64;

/// What the process is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Job {
    /// Everything in one.
    Serve,
    /// The HTTP edge before workers.
    Gateway,
    /// One replica behind gateways.
    Worker,
}

impl Config {
    /// The sections of a cluster, whatever runs with them.
    pub(super) fn check_cluster(&self) -> Faults {
        let mut faults = Faults::default();
        self.check_cluster_ranges(&mut faults);
        let cluster = &self.cluster;
        if let Some(name) = cluster.name.as_deref().filter(|name| !is_name(name)) {
            faults.push(format!(
                "cluster.name = {name:?}: 1 to {NAME_BYTES_MAX} letters, digits, `.`, `_` or `-`, not a dot first"
            ));
        }
        if !cluster.control_listen.ip().is_loopback() && cluster.token_file.is_none() {
            faults.push(format!(
                "cluster.control_listen = {}: away from loopback the control listener needs cluster.token_file",
                cluster.control_listen
            ));
        }
        if cluster.control_listen.ip().is_unspecified() && cluster.control_advertise.is_none() {
            faults.push(format!(
                "cluster.control_listen = {}: gateways need an address to call: name it in cluster.control_advertise",
                cluster.control_listen
            ));
        }
        if let Some(address) = cluster.control_advertise.as_deref().filter(|address| endpoint(address).is_none()) {
            faults.push(format!("cluster.control_advertise = {address:?}: write HOST:PORT"));
        }
        for worker in &cluster.workers {
            match endpoint(worker) {
                None => faults.push(format!("cluster.workers: {worker:?}: write HOST:PORT")),
                Some((host, _)) if !is_here(host) && cluster.token_file.is_none() => {
                    faults
                        .push(format!("cluster.workers: {worker}: workers away from loopback want cluster.token_file"));
                }
                Some(_) => {}
            }
        }
        if cluster.labels.len() > LABELS_MAX {
            faults.push(format!("cluster.labels: {} labels, at most {LABELS_MAX} are possible", cluster.labels.len()));
        }
        for label in &cluster.labels {
            let is_short = |part: &str| part.len() <= LABEL_BYTES_MAX && !part.contains(['"', '\\']);
            if pair(label).is_none_or(|(name, value)| !is_short(name) || !is_short(value)) {
                faults
                    .push(format!("cluster.labels: {label:?}: write NAME=VALUE, at most {LABEL_BYTES_MAX} bytes each"));
            }
        }
        self.check_discovery(&mut faults);
        self.check_transfer(&mut faults);
        faults
    }

    fn check_cluster_ranges(&self, faults: &mut Faults) {
        let mut range = |name: &str, value: u64, allowed: RangeInclusive<u64>| {
            if !allowed.contains(&value) {
                faults.push(format!("{name} = {value}: must be {}..={}", allowed.start(), allowed.end()));
            }
        };
        let cluster = &self.cluster;
        range("cluster.workers_max", cluster.workers_max as u64, 1..=WORKERS_MAX);
        range("cluster.gateways_max", cluster.gateways_max as u64, 1..=limits::GATEWAYS_MAX as u64);
        range("cluster.quota_floor_ppm", u64::from(cluster.quota_floor_ppm), 0..=1_000_000);
        range("cluster.session_lease_ms", cluster.session_lease_ms, 1_000..=600_000);
        range("cluster.redial_ms", cluster.redial_ms, 50..=60_000);
        range("cluster.replica_id", u64::from(cluster.replica_id), 0..=u64::from(u32::MAX) - 1);
        range("discovery.lease_ms", self.discovery.lease_ms, 300..=3_600_000);
        let handoff = &self.handoff;
        for (name, value) in [
            ("handoff.repeat_ms", handoff.repeat_ms),
            ("handoff.reserve_ms", handoff.reserve_ms),
            ("handoff.open_ms", handoff.open_ms),
            ("handoff.bootstrap_ms", handoff.bootstrap_ms),
            ("handoff.waiting_ms", handoff.waiting_ms),
            ("handoff.transfer_ms", handoff.transfer_ms),
            ("handoff.settle_ms", handoff.settle_ms),
            ("handoff.hold_lease_ms", handoff.hold_lease_ms),
            ("handoff.write_lease_ms", handoff.write_lease_ms),
            ("handoff.grace_ms", handoff.grace_ms),
        ] {
            range(name, value, 10..=600_000);
        }
        let most = u64::from(penstock_base::limits::HANDOFF_COORDINATED_MAX);
        range("handoff.transfers_max", u64::from(handoff.transfers_max), 1..=most);
        if handoff.repeat_ms.saturating_mul(2) > handoff.write_lease_ms.min(handoff.hold_lease_ms) {
            faults.push(format!(
                "handoff.repeat_ms = {}: leases are renewed with what is repeated: at most half of the shorter lease",
                handoff.repeat_ms
            ));
        }
    }

    fn check_discovery(&self, faults: &mut Faults) {
        let discovery = &self.discovery;
        let is_etcd = matches!(self.cluster.discovery, DiscoveryAt::Etcd(_));
        if discovery.etcd_user.is_some() != discovery.etcd_password_file.is_some() {
            faults.push("discovery.etcd_user, discovery.etcd_password_file: one needs the other".to_owned());
        }
        if discovery.etcd_user.is_some() && !is_etcd {
            faults.push("discovery.etcd_user: cluster.discovery is not etcd".to_owned());
        }
        if discovery.tls_certificate_file.is_some() != discovery.tls_key_file.is_some() {
            faults.push("discovery.tls_certificate_file, discovery.tls_key_file: one needs the other".to_owned());
        }
        if !discovery.etcd_prefix.ends_with('/') {
            faults.push(format!("discovery.etcd_prefix = {:?}: must end with a slash", discovery.etcd_prefix));
        }
    }

    fn check_transfer(&self, faults: &mut Faults) {
        let transfer = &self.transfer;
        for (kind, key, listen, advertise) in [
            (TransferKind::Tcp, "tcp", transfer.tcp_listen, transfer.tcp_advertise),
            (TransferKind::Nixl, "nixl", transfer.nixl_listen, transfer.nixl_advertise),
        ] {
            let is_used = transfer.kinds.is_empty() || transfer.kinds.contains(&kind);
            if is_used && listen.ip().is_unspecified() && advertise.is_none() {
                faults.push(format!(
                    "transfer.{key}_listen = {listen}: others need an address to call: name it in transfer.{key}_advertise"
                ));
            }
        }
        for (key, pairs) in [
            ("transfer.nixl_parameters", &transfer.nixl_parameters),
            ("transfer.nixl_environment", &transfer.nixl_environment),
        ] {
            for text in pairs.iter().filter(|text| pair(text).is_none()) {
                faults.push(format!("{key}: {text:?}: write NAME=VALUE"));
            }
        }
    }

    /// Settings that make no sense for what is to run.
    pub fn check_as(&self, job: Job) -> Faults {
        let mut faults = Faults::default();
        let (cluster, replicas) = (&self.cluster, &self.replicas);
        match job {
            Job::Serve => {
                if cluster.share_quotas {
                    faults.push("cluster.share_quotas: `penstock serve` stands alone: gateways share".to_owned());
                }
            }
            Job::Gateway => {
                if cluster.discovery == DiscoveryAt::Memory && cluster.workers.is_empty() {
                    faults.push(
                        "a gateway computes nothing itself: say where its workers are, with --worker HOST:PORT (cluster.workers) \
                         or --discovery (cluster.discovery)"
                            .to_owned(),
                    );
                }
                let has_place = matches!(cluster.discovery, DiscoveryAt::Folder(_) | DiscoveryAt::Etcd(_));
                if cluster.share_quotas && !has_place {
                    faults.push(
                        "cluster.share_quotas: gateways see each other by cluster.discovery = folder:PATH or etcd:URL, and by nothing \
                         else"
                            .to_owned(),
                    );
                }
                if cluster.workers.len() > cluster.workers_max {
                    faults.push(format!(
                        "cluster.workers: {} workers are named, and cluster.workers_max is {}",
                        cluster.workers.len(),
                        cluster.workers_max
                    ));
                }
            }
            Job::Worker => {
                if replicas.count != 1 || replicas.prefill > 0 || replicas.decode > 0 {
                    faults.push(
                        "replicas.count, replicas.prefill, replicas.decode: a worker is one replica: start one worker for each, \
                         with --role"
                            .to_owned(),
                    );
                }
                if self.server.keys.is_some() {
                    faults.push("server.keys: tenants are known at the gateway: name the key file there".to_owned());
                }
                let has_label =
                    cluster.labels.iter().any(|label| pair(label).is_some_and(|(name, _)| name == cluster.near_label));
                if cluster.near == Near::Required && !has_label {
                    faults.push(format!(
                        "cluster.near = required: this worker has no label {:?} by which it could be near to another: add one to \
                         cluster.labels",
                        cluster.near_label
                    ));
                }
            }
        }
        faults
    }
}

fn is_name(name: &str) -> bool {
    let is_of_it = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && !name.starts_with('.') && name.bytes().all(is_of_it)
}

/// Host and port of `HOST:PORT`.
fn endpoint(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    let is_host = !host.is_empty() && !host.contains(['/', '"', '\\', ' ']);
    is_host.then_some((host, port))
}

/// Is that this machine, as its name says?
fn is_here(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str, job: Job) -> String {
        let (config, mut faults) = crate::config::parse(text);
        faults.extend(config.check());
        faults.extend(config.check_as(job));
        faults.to_string()
    }

    #[test]
    fn a_gateway_needs_somebody_to_compute() {
        assert!(faults("", Job::Gateway).contains("--worker HOST:PORT"));
        assert_eq!(faults("[cluster]\nworkers = [\"127.0.0.1:8200\"]\n", Job::Gateway), "");
        assert_eq!(faults("[cluster]\ndiscovery = \"kubernetes\"\n", Job::Gateway), "");
        let two = "[cluster]\nworkers_max = 1\nworkers = [\"localhost:1\", \"localhost:2\"]\n";
        assert!(faults(two, Job::Gateway).contains("2 workers are named, and cluster.workers_max is 1"));
    }

    #[test]
    fn shared_quotas_need_a_place_to_see_each_other() {
        let shared = "[cluster]\nshare_quotas = true\n";
        assert!(faults(shared, Job::Serve).contains("stands alone"));
        assert!(faults(&format!("{shared}discovery = \"kubernetes\"\n"), Job::Gateway).contains("folder:PATH"));
        assert_eq!(faults(&format!("{shared}discovery = \"folder:/tmp\"\n"), Job::Gateway), "");
    }

    #[test]
    fn a_worker_is_one_replica() {
        assert_eq!(faults("", Job::Worker), "");
        // Nobody who decodes is needed to start: it waits.
        assert_eq!(faults("[cluster]\nrole = \"prefill\"\n", Job::Worker), "");
        assert!(faults("[replicas]\ncount = 2\n", Job::Worker).contains("one replica"));
        assert!(faults("[replicas]\nprefill = 1\ndecode = 1\n", Job::Worker).contains("--role"));
        assert!(faults("[server]\nkeys = \"keys.toml\"\n", Job::Worker).contains("at the gateway"));
        let near = "[cluster]\nnear = \"required\"\nnear_label = \"zone\"\n";
        assert!(faults(near, Job::Worker).contains("no label \"zone\""));
        assert_eq!(faults(&format!("{near}labels = [\"zone=a\"]\n"), Job::Worker), "");
    }

    #[test]
    fn away_from_loopback_a_token_is_needed_and_an_address_to_call() {
        let open = faults("[cluster]\ncontrol_listen = \"0.0.0.0:8200\"\n", Job::Worker);
        assert!(open.contains("needs cluster.token_file") && open.contains("cluster.control_advertise"), "{open}");
        let closed =
            "[cluster]\ncontrol_listen = \"0.0.0.0:8200\"\ntoken_file = \"t\"\ncontrol_advertise = \"worker-1:8200\"\n";
        assert_eq!(faults(closed, Job::Worker), "");
        let far = "[cluster]\nworkers = [\"worker-1:8200\"]\n";
        assert!(
            faults(far, Job::Gateway).contains("worker-1:8200: workers away from loopback want cluster.token_file")
        );
        assert_eq!(faults(&format!("{far}token_file = \"t\"\n"), Job::Gateway), "");
        let tcp = faults("[transfer]\ntcp_listen = \"0.0.0.0:0\"\n", Job::Worker);
        assert!(tcp.contains("transfer.tcp_advertise"), "{tcp}");
    }

    #[test]
    fn what_cannot_be_is_named_with_what_can() {
        let text = "[cluster]\nname = \"a b\"\ndiscovery = \"zookeeper\"\nworkers = [\"nowhere\"]\nlabels = [\"zone\"]\nnear = \"close\"\n\
                    [handoff]\nrepeat_ms = 600\n[discovery]\netcd_user = \"u\"\n[transfer]\nkinds = [\"rdma\"]\nnixl_environment = [\"UCX_TLS\"]\n";
        let faults = faults(text, Job::Serve);
        for part in [
            "cluster.name = \"a b\"",
            "folder:PATH",
            "write HOST:PORT",
            "write NAME=VALUE",
            "preferred",
            "at most half of the shorter lease",
            "discovery.etcd_password_file",
            "is not etcd",
            "`memfd`, `nixl`, `tcp`",
            "transfer.nixl_environment: \"UCX_TLS\"",
        ] {
            assert!(faults.contains(part), "{part} is missing in:\n{faults}");
        }
    }
}
