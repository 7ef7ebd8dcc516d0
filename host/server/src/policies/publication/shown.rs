//! How things are with the sets: for the log, for the configuration, for the admin listener.

use penstock_engine::Engine;
use serde_json::{Value, json};

use super::{Active, Known, Publication};
use crate::policies::Fault;
use crate::policies::maker::Maker;

impl Publication {
    /// In words, for the log and the first lines of the server: who sits where, as which generation, of which set, and why.
    pub fn summary(&self) -> String {
        let state = self.state();
        let Active { digest, generation, .. } = &state.active;
        let maker = self.maker.as_ref().ok();
        let seats = state.sets.get(digest).map(|known| known.set.seats(maker)).unwrap_or_default();
        let name = |seat: &Value| {
            let text = |field: &str| seat[field].as_str().map(str::to_owned);
            let component = text("component").map(|digest| format!(" {}", short(&digest)));
            let policy = text("policy").unwrap_or_default();
            format!("{} {policy}{}", text("seat").unwrap_or_default(), component.unwrap_or_default())
        };
        let names = seats.iter().map(name).collect::<Vec<_>>().join(", ");
        format!("{names}; generation {generation}, set {} ({})", short(digest), state.origin)
    }

    /// The same for the head of the configuration: one comment a line, with parameters and budgets.
    pub fn comments(&self, engine: &Engine) -> String {
        let state = self.state();
        let seats = state.sets.get(&state.active.digest).map(|known| known.set.seats(self.maker.as_ref().ok()));
        let (digest, by) = (&state.active.digest, state.active.by.name());
        let head = format!("# policy set in force: {digest} (generation {}, by {by})\n", engine.policy_generation().0);
        seats.iter().flatten().fold(head, |text, seat| text + &seat_comment(seat))
    }

    /// Everything: what is in force, by seat; every known set with its state; components; what happened lately.
    pub fn list(&self, engine: &Engine) -> Value {
        let maker = self.maker.as_ref().ok();
        let state = self.state();
        let set = |(digest, known): (&String, &Known)| {
            let standing = match &known.bad {
                _ if *digest == state.active.digest => "in-force",
                Some(_) => "quarantined",
                None if state.good.last() == Some(digest) => "last-good",
                None if state.good.contains(digest) => "good",
                None => "known",
            };
            json!({"digest": digest, "state": standing, "reason": known.bad})
        };
        let active = state.sets.get(&state.active.digest);
        let replicas = engine.status().replicas;
        json!({
            "generation": state.active.generation,
            "digest": state.active.digest,
            "since_s": state.active.since_s,
            "by": state.active.by.name(),
            "origin": state.origin,
            "kept_in": self.folder.as_ref().map(|folder| folder.path().display().to_string()),
            "seats": active.map(|known| known.set.seats(maker)),
            "replicas": replicas.iter()
                .map(|replica| json!({"replica": replica.replica.0, "generation": replica.generation.0}))
                .collect::<Vec<_>>(),
            "sets": state.sets.iter().map(set).collect::<Vec<_>>(),
            "components": maker.map(Maker::components).unwrap_or_default(),
            "native_only": self.maker.as_ref().err(),
            "instances_alive": maker.map_or(0, Maker::instances_alive),
            "sets_leaving": engine.policies_leaving(),
            "counters": state.counters.iter()
                .map(|((decision, policy, name), sum)| json!({"seat": decision, "policy": policy, "name": name, "count": sum}))
                .collect::<Vec<_>>(),
            "history": state.history,
        })
    }

    /// One set, or one component, by its digest.
    ///
    /// # Errors
    /// Neither is known.
    pub fn inspect(&self, digest: &str) -> Result<Value, Fault> {
        let maker = self.maker.as_ref().ok();
        let digest = digest.strip_prefix("sha256:").unwrap_or(digest);
        if let Some(known) = self.state().sets.get(digest) {
            let mut seats = known.set.seats(maker);
            for seat in &mut seats {
                let component = seat["component"].as_str().and_then(|component| maker?.component(component));
                if let Some(component) = component {
                    seat["declares"] = component["declares"].clone();
                    seat["version"] = component["version"].clone();
                }
            }
            return Ok(
                json!({"digest": digest, "document": known.set.document(), "seats": seats, "reason": known.bad}),
            );
        }
        maker
            .and_then(|maker| maker.component(digest))
            .ok_or_else(|| Fault::Unknown(format!("policy set or component {digest}")))
    }

    /// The known set or component whose digest begins so, when it is the only one.
    pub fn whole_digest(&self, head: &str) -> Option<String> {
        let head = head.strip_prefix("sha256:").unwrap_or(head);
        let state = self.state();
        let components = self.maker.as_ref().map(Maker::components).unwrap_or_default();
        let components = components.iter().filter_map(|component| component["digest"].as_str().map(str::to_owned));
        let mut found = state.sets.keys().cloned().chain(components).filter(|digest| digest.starts_with(head));
        let only = found.next()?;
        found.next().is_none().then_some(only)
    }
}

/// The beginning of a digest, for people.
fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

/// One seat as a comment of the configuration.
pub(super) fn seat_comment(seat: &Value) -> String {
    let text = |field: &str| seat[field].as_str().unwrap_or("-");
    let component = seat["component"].as_str().map(|digest| format!(" sha256:{digest}")).unwrap_or_default();
    let parameters = seat.get("parameters").map(|parameters| format!(" parameters {parameters}")).unwrap_or_default();
    let budget = seat.get("fuel_base").map(|base| format!(" fuel-base {base} max-rows {}", seat["max_rows"]));
    let budget = budget.unwrap_or_default();
    format!("#   {}: {} {}{component}{budget}{parameters}\n", text("seat"), text("kind"), text("policy"))
}
