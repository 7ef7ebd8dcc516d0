//! What do the two machines have in common, as far as a log is concerned?

use std::hash::{BuildHasher, Hasher};

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::map::FixedState;
use penstock_base::{Generation, Instant};
use penstock_policy_api::Policies;
use penstock_sched::gateway::{Gateway, GatewayConfig, GatewayEffect, GatewayInput};
use penstock_sched::replica::{Replica, ReplicaConfig, ReplicaEffect, ReplicaInput};

use crate::header::MachineId;
use crate::wire::{Decode, Encode};

/// Which of the two.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MachineKind {
    /// The gateway machine.
    Gateway,
    /// The replica machine.
    Replica,
}

/// A machine that can be logged and replayed.
pub trait Machine: Sized {
    /// Which of the two.
    const KIND: MachineKind;
    /// What goes in.
    type Input: Encode + Decode + Clone;
    /// What comes out.
    type Effect: Encode;
    /// How it is set up.
    type Config: Encode + Decode + Clone;

    /// Which machine a configuration makes.
    fn id(config: &Self::Config) -> MachineId;
    /// The context window that the native policies of this machine are given.
    fn context_tokens_max(config: &Self::Config) -> u32;
    /// Writes the state.
    fn save(&self, out: &mut Writer);
    /// Reads what [`Self::save`] wrote under the same configuration.
    ///
    /// # Errors
    /// Bytes that do not make a sound machine.
    fn restore(config: Self::Config, bytes: &[u8]) -> Result<Self, DecodeError>;
    /// Advances by one input.
    fn advance(
        &mut self,
        now: Instant,
        input: Self::Input,
        policies: &mut dyn Policies,
        effects: &mut Vec<Self::Effect>,
    );
    /// The full walk over the invariants.
    ///
    /// # Errors
    /// The name of the one that does not hold.
    fn sound(&self) -> Result<(), &'static str>;
    /// When it wants to be asked next.
    fn wake(&self) -> Instant;
    /// Digest of all decisions so far.
    fn decisions(&self) -> u64;
    /// Generation of the policy set in force.
    fn generation(&self) -> Generation;
}

impl Machine for Gateway {
    const KIND: MachineKind = MachineKind::Gateway;
    type Input = GatewayInput;
    type Effect = GatewayEffect;
    type Config = GatewayConfig;

    fn id(config: &GatewayConfig) -> MachineId {
        MachineId { kind: Self::KIND, number: 0, epoch: u64::from(config.epoch.0) }
    }
    fn context_tokens_max(config: &GatewayConfig) -> u32 {
        config.context_tokens_max
    }
    fn save(&self, out: &mut Writer) {
        self.encode(out);
    }
    fn restore(config: GatewayConfig, bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Reader::new(bytes);
        let machine = Self::decode(config, &mut from)?;
        from.finish()?;
        Ok(machine)
    }
    fn advance(
        &mut self,
        now: Instant,
        input: GatewayInput,
        policies: &mut dyn Policies,
        effects: &mut Vec<GatewayEffect>,
    ) {
        self.step(now, input, policies, effects);
    }
    fn sound(&self) -> Result<(), &'static str> {
        self.check()
    }
    fn wake(&self) -> Instant {
        self.next_wake()
    }
    fn decisions(&self) -> u64 {
        self.decision_digest()
    }
    fn generation(&self) -> Generation {
        Gateway::generation(self)
    }
}

impl Machine for Replica {
    const KIND: MachineKind = MachineKind::Replica;
    type Input = ReplicaInput;
    type Effect = ReplicaEffect;
    type Config = ReplicaConfig;

    fn id(config: &ReplicaConfig) -> MachineId {
        MachineId { kind: Self::KIND, number: config.replica.0, epoch: config.epoch.0 }
    }
    fn context_tokens_max(config: &ReplicaConfig) -> u32 {
        config.context_tokens_max
    }
    fn save(&self, out: &mut Writer) {
        self.encode(out);
    }
    fn restore(config: ReplicaConfig, bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut from = Reader::new(bytes);
        let machine = Self::decode(config, &mut from)?;
        from.finish()?;
        Ok(machine)
    }
    fn advance(
        &mut self,
        now: Instant,
        input: ReplicaInput,
        policies: &mut dyn Policies,
        effects: &mut Vec<ReplicaEffect>,
    ) {
        self.step(now, input, policies, effects);
    }
    fn sound(&self) -> Result<(), &'static str> {
        self.check()
    }
    fn wake(&self) -> Instant {
        self.next_wake()
    }
    fn decisions(&self) -> u64 {
        self.decision_digest()
    }
    fn generation(&self) -> Generation {
        Replica::generation(self)
    }
}

/// Digest of the effects of one step. `scratch` is only room.
pub fn digest_effects<E: Encode>(effects: &[E], scratch: &mut Writer) -> u64 {
    scratch.clear();
    effects.iter().for_each(|effect| effect.put(scratch));
    digest_bytes(scratch.bytes())
}

/// Digest of bytes: tells two runs apart, defends against nobody.
pub fn digest_bytes(bytes: &[u8]) -> u64 {
    let mut hasher = FixedState.build_hasher();
    hasher.write(bytes);
    hasher.write_u64(bytes.len() as u64);
    hasher.finish()
}
