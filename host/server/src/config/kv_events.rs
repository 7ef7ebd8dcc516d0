//! The section `kv_events`: whether and where it is told what the replicas cache.

use std::net::SocketAddr;

use penstock_engine::PublisherSettings;
use serde::{Deserialize, Serialize};

use super::check::Faults;

/// What is told of the prefix cache, and to whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvEventsConfig {
    /// Where subscribers connect; none is that nothing is published. The port is the first replica's, those of the others follow.
    pub publish: Option<SocketAddr>,
    /// Where they ask for what they missed. Without it nothing is kept for them. Ports as above.
    pub replay: Option<SocketAddr>,
    /// Addresses that other hosts can reach are allowed.
    pub expose: bool,
    /// First frame of each message.
    pub topic: String,
    /// The tokens of blocks are told as well: they are the prompts and the answers.
    pub with_tokens: bool,
    /// Batches kept for replay.
    pub buffer_batches: usize,
    /// Batches that wait for one subscriber.
    pub queue_batches: usize,
}

impl Default for KvEventsConfig {
    fn default() -> Self {
        let PublisherSettings { expose, topic, with_tokens, buffer_batches, queue_batches, .. } =
            PublisherSettings::default();
        Self { publish: None, replay: None, expose, topic, with_tokens, buffer_batches, queue_batches }
    }
}

impl KvEventsConfig {
    /// As the engine takes it; none when nothing is published.
    pub fn settings(&self) -> Option<PublisherSettings> {
        let Self { publish, replay, expose, topic, with_tokens, buffer_batches, queue_batches } = self.clone();
        Some(PublisherSettings {
            publish: publish?,
            replay,
            expose,
            topic,
            with_tokens,
            buffer_batches,
            queue_batches,
            ..PublisherSettings::default()
        })
    }

    /// What cannot work, for so many replicas.
    pub fn check(&self, replicas: u32) -> Faults {
        let mut faults = Faults::default();
        let Some(settings) = self.settings() else {
            if self.replay.is_some() {
                faults.push("kv_events.replay: there is nothing to ask again for without kv_events.publish".into());
            }
            return faults;
        };
        if let Err(fault) = settings.check() {
            let fault = fault.to_string();
            faults.push(if fault.starts_with("kv_events") { fault } else { format!("kv_events: {fault}") });
        }
        let last = |address: SocketAddr| u32::from(address.port()) + replicas.max(1) - 1;
        for (key, address) in [("publish", self.publish), ("replay", self.replay)] {
            if let Some(address) = address.filter(|address| address.port() != 0 && last(*address) > u32::from(u16::MAX))
            {
                faults
                    .push(format!("kv_events.{key} = {address}: {replicas} replicas take as many ports from there on"));
            }
        }
        if let (Some(publish), Some(replay)) = (self.publish, self.replay)
            && publish.port() != 0
            && u32::from(publish.port()) <= last(replay)
            && u32::from(replay.port()) <= last(publish)
        {
            faults.push(format!(
                "kv_events.publish = {publish}, kv_events.replay = {replay}: {replicas} replicas take as many ports from each on, and these overlap"
            ));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use crate::config::parse;

    fn faults(text: &str) -> String {
        let (config, mut faults) = parse(text);
        faults.extend(config.check());
        faults.to_string()
    }

    #[test]
    fn nothing_is_published_and_no_tokens_are_told_unless_asked_for() {
        let (config, faults) = parse("");
        assert!(faults.is_empty() && config.kv_events.settings().is_none());
        let (config, _) = parse("[kv_events]\npublish = \"127.0.0.1:5557\"\n");
        let settings = config.kv_events.settings().expect("it has an address");
        assert!(!settings.with_tokens && !settings.expose && settings.replay.is_none());
    }

    #[test]
    fn what_cannot_work_is_named_before_the_start() {
        let has = |text: &str, part: &str| {
            let faults = faults(text);
            assert!(faults.contains(part), "{part} is missing in {faults:?}");
        };
        has("[kv_events]\npublish = \"0.0.0.0:5557\"\n", "set expose");
        has("[kv_events]\nreplay = \"127.0.0.1:5557\"\n", "without kv_events.publish");
        has("[kv_events]\npublish = \"127.0.0.1:5557\"\nbuffer_batches = 0\n", "kv_events.buffer_batches");
        let both = "[kv_events]\npublish = \"127.0.0.1:5557\"\nreplay = \"127.0.0.1:5558\"\n";
        assert_eq!(faults(both), "");
        has(&format!("[replicas]\ncount = 2\n{both}"), "overlap");
        has("[replicas]\ncount = 9\n[kv_events]\npublish = \"127.0.0.1:65530\"\n", "as many ports");
        has("[kv_events]\npublish = 5557\n", "kv_events.publish");
    }
}
