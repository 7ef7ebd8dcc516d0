//! Sets that have left end behind the machines' backs, and never pile up: while one does not end, no further one is made.

mod support;

use std::sync::{Arc, Condvar, Mutex};

use penstock_base::{Duration, Generation, Outcome};
use penstock_engine::{ActivationError, EngineConfig, EngineLimits, PolicySource, ReplicaState};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{AdmissionPolicy, EvictionPolicy, FairnessPolicy, OverloadPolicy, Policies, RoutingPolicy};
use support::{Rig, Sizes, prompt, read};

/// Sets that live, and whether they may end.
#[derive(Default)]
struct Door {
    state: Mutex<(usize, bool)>,
    changed: Condvar,
}

impl Door {
    fn shut(&self, is_shut: bool) {
        self.state.lock().expect("nobody panics with it").1 = is_shut;
        self.changed.notify_all();
    }
    fn alive(&self) -> usize {
        self.state.lock().expect("nobody panics with it").0
    }
}

/// The native set, which cannot end while its door is shut.
struct Lingering {
    native: NativePolicies,
    door: Arc<Door>,
}

impl Drop for Lingering {
    fn drop(&mut self) {
        let state = self.door.state.lock().expect("nobody panics with it");
        let mut state = self.door.changed.wait_while(state, |(_, is_shut)| *is_shut).expect("nobody panics with it");
        state.0 -= 1;
    }
}

impl Policies for Lingering {
    fn generation(&self) -> Generation {
        self.native.generation()
    }
    fn admission(&mut self) -> &mut dyn AdmissionPolicy {
        self.native.admission()
    }
    fn routing(&mut self) -> &mut dyn RoutingPolicy {
        self.native.routing()
    }
    fn fairness(&mut self) -> &mut dyn FairnessPolicy {
        self.native.fairness()
    }
    fn eviction(&mut self) -> &mut dyn EvictionPolicy {
        self.native.eviction()
    }
    fn overload(&mut self) -> &mut dyn OverloadPolicy {
        self.native.overload()
    }
}

#[test]
fn what_does_not_end_keeps_the_next_set_out_and_nobody_waiting() {
    let door = Arc::new(Door::default());
    let opened = Arc::clone(&door);
    let source = PolicySource::new(move |_| {
        opened.state.lock().expect("nobody panics with it").0 += 1;
        Box::new(Lingering { native: NativePolicies::new(Generation(0), 4_096), door: Arc::clone(&opened) })
    });
    let limits = EngineLimits { policy_switch: Duration::from_ms(200), ..EngineLimits::default() };
    let config = EngineConfig { policies: source.clone(), limits, ..EngineConfig::default() };
    let rig = Rig::new(2, Sizes::default(), config);
    rig.wait_until("replicas", |status| status.replicas.iter().all(|r| r.state == ReplicaState::Ready));
    let before = door.alive();
    door.shut(true);
    let first = rig.engine.activate(&source).expect("nothing has left before it").generation;
    for _ in 0..5 {
        // At most three wait: one of each machine.
        let refused = rig.engine.activate(&source).expect_err("those that left do not end");
        assert!(matches!(refused, ActivationError::Crowded(1..=3)), "{refused}");
        assert_eq!(door.alive(), 2 * before, "nothing more was made");
        let got = read(&mut rig.submit(rig.submission(&prompt(1, 6), 8)));
        assert_eq!(got.outcome(), Outcome::Length, "requests are served beside it");
    }
    assert_eq!(rig.engine.policy_generation(), first);
    assert_eq!(rig.metric("penstock_policy_activations_total{model_name=\"fake\",outcome=\"crowded\""), 5.0);
    door.shut(false);
    rig.wait_until("their end", |_| rig.engine.policies_leaving() == 0);
    rig.engine.activate(&source).expect("they have ended");
    rig.wait_until("the end of the others", |_| rig.engine.policies_leaving() == 0);
    assert_eq!(door.alive(), before);
}
