//! Finds every fault of a configuration, not only the first.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;

use penstock_base::limits;
use penstock_exec_cpu::{THREADS_MAX, Tier};
use serde::de::DeserializeOwned;

use super::sections::{AdminListen, Config};

/// What is wrong with a file, one line each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(Vec<String>);

impl Faults {
    /// A single fault.
    pub fn one(fault: String) -> Self {
        Self(vec![fault])
    }
    /// None?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    /// Adds another list.
    pub fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }
    /// Adds one.
    pub fn push(&mut self, fault: String) {
        self.0.push(fault);
    }
    /// Names the file in each line.
    pub fn in_file(self, path: &Path) -> Self {
        Self(self.0.into_iter().map(|fault| format!("{}: {fault}", path.display())).collect())
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("\n"))
    }
}

impl std::error::Error for Faults {}

/// Reads section by section, so that a fault in one does not hide those of the others.
pub fn sections(table: toml::Table) -> (Config, Faults) {
    let mut config = Config::default();
    let mut faults = Faults::default();
    for (name, value) in table {
        match name.as_str() {
            "server" => section(&name, value, &mut config.server, &mut faults),
            "http" => section(&name, value, &mut config.http, &mut faults),
            "model" => section(&name, value, &mut config.model, &mut faults),
            "replicas" => section(&name, value, &mut config.replicas, &mut faults),
            "limits" => section(&name, value, &mut config.limits, &mut faults),
            "generation" => section(&name, value, &mut config.generation, &mut faults),
            "policy" => section(&name, value, &mut config.policy, &mut faults),
            "decisions" => section(&name, value, &mut config.decisions, &mut faults),
            "journal" => section(&name, value, &mut config.journal, &mut faults),
            "kv_events" => section(&name, value, &mut config.kv_events, &mut faults),
            "cluster" => section(&name, value, &mut config.cluster, &mut faults),
            "discovery" => section(&name, value, &mut config.discovery, &mut faults),
            "handoff" => section(&name, value, &mut config.handoff, &mut faults),
            "transfer" => section(&name, value, &mut config.transfer, &mut faults),
            "classes" => section(&name, value, &mut config.classes, &mut faults),
            "objectives" => section(&name, value, &mut config.objectives, &mut faults),
            _ => faults.push(format!(
                "[{name}] is not a section; there are server, http, model, replicas, limits, generation, policy, decisions, journal, kv_events, cluster, discovery, handoff, transfer, classes, objectives"
            )),
        }
    }
    (config, faults)
}

/// Reads key by key where the section is a table of plain keys, so that every bad key is named.
fn section<T: DeserializeOwned + serde::Serialize>(name: &str, value: toml::Value, into: &mut T, faults: &mut Faults) {
    let toml::Value::Table(keys) = value else {
        faults.push(format!("{name} must be a table: write [{name}]"));
        return;
    };
    let mut good = toml::Table::new();
    for (key, value) in keys {
        let mut trial = toml::Table::new();
        trial.insert(key.clone(), value.clone());
        match T::deserialize(toml::Value::Table(trial)) {
            Ok(_) => {
                good.insert(key, value);
            }
            Err(fault) => faults.push(format!("{name}.{key}: {}", fault.to_string().trim().replace('\n', " "))),
        }
    }
    match T::deserialize(toml::Value::Table(good)) {
        Ok(read) => *into = read,
        Err(fault) => faults.push(format!("[{name}]: {}", fault.to_string().trim().replace('\n', " "))),
    }
}

impl Config {
    /// Writes out the classes that the file does not name, so that what is in force can be read.
    pub fn name_all_classes(&mut self) {
        let defaults = penstock_sched::gateway::GatewayConfig::default();
        for rank in penstock_base::ClassRank::all() {
            let class = self.classes.entry(rank.get().to_string()).or_default();
            class.sheddable.get_or_insert(defaults.class_sheddable[rank.index()]);
        }
    }

    /// Values out of range and settings that contradict each other.
    pub fn check(&self) -> Faults {
        let mut faults = Faults::default();
        let mut range = |name: &str, value: u64, allowed: RangeInclusive<u64>| {
            if !allowed.contains(&value) {
                faults.push(format!("{name} = {value}: must be {}..={}", allowed.start(), allowed.end()));
            }
        };
        let replicas = &self.replicas;
        range("replicas.count", u64::from(replicas.count), 1..=64);
        range("replicas.prefill", u64::from(replicas.prefill), 0..=63);
        range("replicas.decode", u64::from(replicas.decode), 0..=64 - u64::from(replicas.prefill.min(63)));
        range("replicas.handoff_tokens_min", u64::from(replicas.handoff_tokens_min), 1..=1 << 20);
        range("replicas.threads", replicas.threads as u64, 0..=THREADS_MAX as u64);
        // 0 is what fits.
        if replicas.kv_blocks != 0 {
            range("replicas.kv_blocks", u64::from(replicas.kv_blocks), 2..=u64::from(limits::POOL_BLOCKS_MAX));
        }
        range("replicas.context_tokens", u64::from(replicas.context_tokens), 0..=u64::from(limits::CONTEXT_TOKENS_MAX));
        range("replicas.block_size_tokens", u64::from(replicas.block_size_tokens), 1..=256);
        range("replicas.slots", u64::from(replicas.slots), u64::from(limits::SEQUENCES_MAX)..=limits::SLOTS_MAX as u64);
        range("replicas.step_tokens", u64::from(replicas.step_tokens), 1..=u64::from(limits::STEP_TOKENS_MAX));
        range("replicas.chunk_tokens", u64::from(replicas.chunk_tokens), 1..=u64::from(replicas.step_tokens.max(1)));
        range("replicas.overlap", replicas.overlap as u64, 1..=limits::INFLIGHT_MAX as u64);
        range("replicas.ready_window", replicas.ready_window as u64, 0..=limits::READY_WINDOW_MAX as u64);
        let bounds = &self.limits;
        range("limits.queue_requests_max", u64::from(bounds.queue_requests_max), 1..=limits::QUEUE_REQUESTS_MAX as u64);
        range("limits.queue_tokens_max", bounds.queue_tokens_max, 1..=limits::QUEUE_TOKENS_MAX);
        range("limits.queue_wait_ms", bounds.queue_wait_ms, 1..=86_400_000);
        range("limits.request_timeout_ms", bounds.request_timeout_ms, 1..=86_400_000);
        range("limits.starve_ms", bounds.starve_ms, 1..=86_400_000);
        range("limits.no_progress_ms", bounds.no_progress_ms, 1_000..=86_400_000);
        range("limits.migrations_max", u64::from(bounds.migrations_max), 0..=1_000);
        range("limits.quota_window_ms", bounds.quota_window_ms, 1_000..=86_400_000);
        range("limits.prompts_max", bounds.prompts_max as u64, 1..=1_024);
        let http = &self.http;
        range("http.connections_max", http.connections_max as u64, 1..=1 << 20);
        range("http.body_bytes_max", http.body_bytes_max as u64, 1_024..=1 << 30);
        range("http.pending_bytes_max", http.pending_bytes_max as u64, http.body_bytes_max as u64..=1 << 34);
        range("http.requests_max", http.requests_max as u64, 1..=limits::RUNNING_REQUESTS_MAX as u64);
        range("http.headers_timeout_ms", http.headers_timeout_ms, 100..=600_000);
        range("http.body_timeout_ms", http.body_timeout_ms, 100..=600_000);
        range("http.send_timeout_ms", http.send_timeout_ms, 100..=600_000);
        range("http.send_buffer_bytes", http.send_buffer_bytes as u64, 4_096..=16 << 20);
        range("http.stream_buffer_bytes", http.stream_buffer_bytes as u64, 4_096..=64 << 20);
        range("http.heartbeat_ms", http.heartbeat_ms, 100..=600_000);
        range("generation.chat_output_tokens", u64::from(self.generation.chat_output_tokens), 1..=1 << 20);
        range("generation.completion_output_tokens", u64::from(self.generation.completion_output_tokens), 1..=1 << 20);
        range("policy.overload_tick_ms", self.policy.overload_tick_ms, 10..=10_000);
        range("decisions.sample_ppm", u64::from(self.decisions.sample_ppm), 0..=1_000_000);
        range("decisions.inputs_bytes", self.decisions.inputs_bytes as u64, 65_536..=1 << 30);
        let journal = &self.journal;
        range("journal.segment_bytes", journal.segment_bytes, 65_536..=1 << 32);
        // One open segment a machine must fit beside one that is complete.
        let open = journal.segment_bytes.saturating_mul(2 + u64::from(replicas.total()));
        range("journal.total_bytes", journal.total_bytes, open..=1 << 50);
        range("journal.queue_bytes", journal.queue_bytes as u64, 1 << 20..=1 << 32);
        range("server.drain_grace_s", self.server.drain_grace_s, 0..=86_400);
        range("server.edge_threads", self.server.edge_threads as u64, 0..=64);
        for (name, objective) in &self.objectives {
            range(&format!("objectives.{name}.class"), u64::from(objective.class), 0..=7);
        }
        if (replicas.prefill == 0) != (replicas.decode == 0) {
            faults.push(
                "replicas.prefill, replicas.decode: one needs the other: some compute prompts, the others decode"
                    .into(),
            );
        }
        if replicas.prefill > 0 && replicas.count != 1 {
            faults.push(format!("replicas.count = {}: say either count, or prefill and decode", replicas.count));
        }
        for name in self.classes.keys() {
            if name.parse::<u8>().map_or(true, |rank| rank > 7) {
                faults.push(format!("classes.{name}: a class is \"0\" to \"7\""));
            }
        }
        if let Err(fault) = Tier::choose(&self.replicas.cpu_tier) {
            faults.push(format!("replicas.cpu_tier: {fault}"));
        }
        faults.extend(self.check_admin());
        faults.extend(self.kv_events.check(self.replicas.total()));
        faults.extend(self.check_cluster());
        faults
    }

    fn check_admin(&self) -> Faults {
        match self.server.admin_listen {
            AdminListen::At(address) if !address.ip().is_loopback() && self.server.admin_token_file.is_none() => {
                Faults::one(format!(
                    "server.admin_listen = {address}: away from loopback the admin listener needs server.admin_token_file"
                ))
            }
            _ => Faults::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Faults, KvDtype, Precision};

    fn parse(text: &str) -> Result<Config, Faults> {
        let (config, mut faults) = crate::config::parse(text);
        faults.extend(config.check());
        if faults.is_empty() { Ok(config) } else { Err(faults) }
    }

    #[test]
    fn every_fault_of_a_file_is_named_at_once() {
        let faults = parse(
            "[server]\nlisten = \"nowhere\"\ndrain_grace_seconds = 3\n[replicas]\ncount = 0\nkv_blocks = \"many\"\n[engine]\n",
        )
        .unwrap_err()
        .to_string();
        for part in
            ["server.listen", "server.drain_grace_seconds", "replicas.count = 0", "replicas.kv_blocks", "[engine]"]
        {
            assert!(faults.contains(part), "{part} is missing in:\n{faults}");
        }
        assert_eq!(faults.lines().count(), 5, "{faults}");
    }

    #[test]
    fn threads_have_bounds_of_their_own() {
        let config = parse("[server]\nedge_threads = 64\n[replicas]\nthreads = 512\n").unwrap();
        assert_eq!((config.server.edge_threads, config.replicas.threads), (64, 512));
        let faults = parse("[server]\nedge_threads = 65\n[replicas]\nthreads = 513\n").unwrap_err().to_string();
        assert!(faults.contains("server.edge_threads = 65") && faults.contains("replicas.threads = 513"), "{faults}");
    }

    #[test]
    fn an_open_admin_listener_needs_a_token() {
        let faults = parse("[server]\nadmin_listen = \"0.0.0.0:9000\"\n").unwrap_err().to_string();
        assert!(faults.contains("loopback"), "{faults}");
        parse("[server]\nadmin_listen = \"0.0.0.0:9000\"\nadmin_token_file = \"token\"\n").unwrap();
        parse("[server]\nadmin_listen = \"off\"\n").unwrap();
    }

    #[test]
    fn a_tier_is_taken_by_its_name_and_refused_with_the_names_there_are() {
        assert_eq!(parse("[replicas]\ncpu_tier = \"scalar\"\n").unwrap().replicas.cpu_tier, "scalar");
        let faults = parse("[replicas]\ncpu_tier = \"sse2\"\n").unwrap_err().to_string();
        assert!(faults.contains("replicas.cpu_tier: `sse2`") && faults.contains("auto, scalar"), "{faults}");
        let foreign = if cfg!(target_arch = "aarch64") { "avx2" } else { "neon" };
        let faults = parse(&format!("[replicas]\ncpu_tier = \"{foreign}\"\n")).unwrap_err().to_string();
        assert!(faults.contains(&format!("tier {foreign} needs")), "{faults}");
    }

    #[test]
    fn keys_and_values_are_held_in_one_of_two_ways() {
        assert_eq!(parse("").unwrap().replicas.kv_dtype, KvDtype::Bf16);
        assert_eq!(parse("[replicas]\nkv_dtype = \"int8\"\n").unwrap().replicas.kv_dtype, KvDtype::Int8);
        let faults = parse("[replicas]\nkv_dtype = \"fp8\"\n").unwrap_err().to_string();
        for part in ["replicas", "kv_dtype", "bf16", "int8"] {
            assert!(faults.contains(part), "{part} is missing in: {faults}");
        }
    }

    #[test]
    fn products_are_exact_unless_bfloat16_is_asked_for() {
        assert_eq!(parse("").unwrap().replicas.precision, Precision::Int15);
        assert_eq!(parse("[replicas]\nprecision = \"bf16\"\n").unwrap().replicas.precision, Precision::Bf16);
        let faults = parse("[replicas]\nprecision = \"fp32\"\n").unwrap_err().to_string();
        for part in ["replicas", "precision", "int15", "bf16"] {
            assert!(faults.contains(part), "{part} is missing in: {faults}");
        }
    }

    #[test]
    fn the_defaults_are_valid_and_survive_a_round_trip() {
        let text = toml::to_string(&crate::config::Config::default()).unwrap();
        assert_eq!(parse(&text).unwrap(), crate::config::Config::default());
    }
}
