//! Who is this process among others, and what must both ends have in common?

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use penstock_base::{GatewayEpoch, ReplicaId};
use penstock_discovery::WorkerId;
use penstock_model::Namespace;
use sha2::{Digest as _, Sha256};

use crate::config::{Config, DiscoveryAt, pair};

/// Shortest token that is taken: 128 bits in hexadecimal have 32.
const TOKEN_BYTES_MIN: usize = 16;

/// The name that was given, or one of host and port: the same when the process starts again at the same place. In Kubernetes a worker has its
/// pod's name, which is the host's.
///
/// # Errors
/// The host has no name that would do.
pub fn name(config: &Config, port: u16) -> Result<WorkerId> {
    if let Some(name) = &config.cluster.name {
        return name.parse().context("cluster.name");
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host: String = host.trim().chars().map(|c| if is_of_a_name(c) { c } else { '-' }).collect();
    let host = if host.is_empty() { "localhost" } else { host.trim_start_matches('.') };
    let name = match config.cluster.discovery {
        DiscoveryAt::Kubernetes => host.to_owned(),
        _ => format!("{host}-{port}"),
    };
    name.parse().with_context(|| format!("{name:?} is no name for this process: give it one with --name"))
}

fn is_of_a_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_')
}

fn digest(kind: &str, name: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"penstock-cluster-1\0");
    hash.update(kind);
    hash.update(b"\0");
    hash.update(name);
    hash.finalize().into()
}

fn word(digest: [u8; 32]) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&digest[..8]);
    u64::from_le_bytes(bytes)
}

/// The number by which control connections know a process.
pub fn number(name: &WorkerId) -> u64 {
    word(digest("end", name.as_str()))
}

/// The number of a worker's replica: configured, or from its name. Two names may have the same one by chance, in one of some 95,000 clusters
/// of 300 workers; a gateway says so and refuses the second.
pub fn replica(config: &Config, name: &WorkerId) -> ReplicaId {
    if config.cluster.replica_id != 0 {
        return ReplicaId(config.cluster.replica_id);
    }
    // Neither the first replica of a process that is alone, nor the number that stands for none.
    ReplicaId((word(digest("replica", name.as_str())) as u32).clamp(1, u32::MAX - 1))
}

/// A gateway's number among those before the same workers: its starts are counted from a place of its own.
pub fn gateway_epoch(name: &WorkerId, starts: GatewayEpoch) -> GatewayEpoch {
    let from = word(digest("gateway", name.as_str())) as u16;
    GatewayEpoch(from.wrapping_add(starts.0).max(1))
}

/// Workers with equal values of the label that counts are in one domain; 0 is none.
pub fn domain(config: &Config) -> u32 {
    let cluster = &config.cluster;
    let value = cluster.labels.iter().filter_map(|label| pair(label)).find(|(name, _)| *name == cluster.near_label);
    value.map_or(0, |(name, value)| (word(digest(name, value)) as u32).max(1))
}

/// The life that begins now.
pub fn life() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX).max(1)
}

/// What both ends of a control connection must have in common, in words that can be compared by eye.
pub fn compatibility(config: &Config, namespace: &Namespace) -> String {
    let dtype = format!("{:?}", config.replicas.kv_dtype).to_lowercase();
    let precision = format!("{:?}", config.replicas.precision).to_lowercase();
    format!(
        "model {} precision {precision} kv {dtype} block {} control {} handoff {}",
        namespace.fingerprint(),
        config.replicas.block_size_tokens,
        penstock_control::VERSION,
        penstock_sched::handoff::PROTOCOL_VERSION,
    )
}

/// Reads the token that both ends show; blanks around it do not count.
///
/// # Errors
/// A file that cannot be read, a token that is too short or cannot be sent.
pub fn token(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read the cluster token {}", path.display()))?;
    let token = text.trim();
    ensure!(
        token.len() >= TOKEN_BYTES_MIN,
        "the cluster token in {} has {} bytes, at least {TOKEN_BYTES_MIN} are needed: openssl rand -hex 32 > FILE",
        path.display(),
        token.len()
    );
    ensure!(
        token.bytes().all(|byte| byte.is_ascii_graphic()),
        "the cluster token in {} has other than visible ASCII: openssl rand -hex 32 > FILE",
        path.display()
    );
    Ok(token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> WorkerId {
        name.parse().unwrap()
    }

    #[test]
    fn numbers_come_from_names_and_stay() {
        let config = Config::default();
        // From `printf 'penstock-cluster-1\0replica\0decode-0' | sha256sum`: the first eight bytes, the least first.
        assert_eq!(replica(&config, &named("decode-0")), ReplicaId(75_102_793));
        assert_ne!(replica(&config, &named("decode-0")), replica(&config, &named("decode-1")));
        assert_ne!(number(&named("a")), number(&named("b")));
        let mut config = config;
        config.cluster.replica_id = 7;
        assert_eq!(replica(&config, &named("decode-0")), ReplicaId(7));
    }

    #[test]
    fn gateways_of_one_count_differ_and_none_is_zero() {
        let one = named("one");
        let from = gateway_epoch(&one, GatewayEpoch(1)).0;
        assert_ne!(from, gateway_epoch(&named("two"), GatewayEpoch(1)).0);
        let before_zero = GatewayEpoch(0u16.wrapping_sub(from.wrapping_sub(1)));
        assert_eq!(gateway_epoch(&one, before_zero), GatewayEpoch(1));
    }

    #[test]
    fn the_domain_is_the_value_of_the_label_that_counts() {
        let at = |labels: &[&str], near_label: &str| {
            let mut config = Config::default();
            config.cluster.labels = labels.iter().map(|label| (*label).to_owned()).collect();
            config.cluster.near_label = near_label.to_owned();
            domain(&config)
        };
        assert_eq!(at(&["zone=a", "host=x"], "zone"), at(&["zone=a", "host=y"], "zone"));
        assert_ne!(at(&["zone=a", "host=x"], "host"), at(&["zone=a", "host=y"], "host"));
        assert_eq!(at(&["zone=a"], "host"), 0);
    }

    #[test]
    fn a_token_is_long_and_can_be_sent() {
        let dir = std::env::temp_dir().join(format!("penstock-token-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("token");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            token(&path).map_err(|fault| fault.to_string())
        };
        assert_eq!(read("  0123456789abcdef\n").unwrap(), "0123456789abcdef");
        assert!(read("short").unwrap_err().contains("has 5 bytes, at least 16"));
        assert!(read("0123456789 abcdef").unwrap_err().contains("visible ASCII"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
