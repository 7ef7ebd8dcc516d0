//! What part of the tenants' quotas is this gateway's, and until when?

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Instant, TenantId};

use super::State;
use super::io::{GatewayConfig, GatewayEffect, GatewayEvent};
use super::ledger::OverQuota;
use super::seats::Cx;
use crate::quota::{QuotaShare, QuotaSlots};

/// The newest lease, and what was said of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Share {
    lease: QuotaShare,
    /// The part that was told last.
    told_ppm: u64,
}

impl Share {
    /// All of it where there is no other gateway; nothing before the first lease where there are some.
    pub fn new(config: &GatewayConfig) -> Self {
        let is_alone = config.gateways <= 1;
        let (slots, until, told_ppm) = if is_alone {
            (QuotaSlots::ALL, Instant::NEVER, 1_000_000)
        } else {
            (QuotaSlots::NONE, Instant::ZERO, u64::from(config.quota_floor_ppm))
        };
        let lease = QuotaShare { slots, members: config.gateways, as_of: Instant::ZERO, until };
        Self { lease, told_ppm }
    }

    /// The end of the lease; [`Instant::NEVER`] when it has none, or is over and that was told.
    pub fn due(&self, now: Instant) -> Instant {
        if now < self.lease.until { self.lease.until } else { Instant::NEVER }
    }

    /// Gateways that are reckoned with.
    pub fn members(&self) -> u32 {
        self.lease.members
    }

    /// When the view was asked for that the lease follows from; none where quotas are this gateway's own, or before the first lease.
    pub fn as_of(&self) -> Option<Instant> {
        (self.lease.until != Instant::NEVER && self.lease.until != Instant::ZERO).then_some(self.lease.as_of)
    }

    /// Is there a lease now?
    pub fn is_held(&self, now: Instant) -> bool {
        now < self.lease.until
    }

    /// The part in force now.
    pub fn ppm(&self, now: Instant, config: &GatewayConfig) -> u64 {
        if self.is_held(now) { self.lease.slots.ppm() } else { u64::from(config.quota_floor_ppm) }
    }

    /// What is to be given out here of a tenant's quota now.
    fn of(&self, quota: u64, tenant: TenantId, now: Instant, config: &GatewayConfig) -> u64 {
        if quota == u64::MAX || self.is_held(now) {
            return self.lease.slots.allowance(quota, tenant);
        }
        let part = u128::from(quota) * u128::from(config.quota_floor_ppm) / 1_000_000;
        u64::try_from(part).unwrap_or(u64::MAX)
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        self.lease.slots.0.iter().for_each(|word| out.u64(*word));
        out.u32(self.lease.members);
        out.u64(self.lease.as_of.0);
        out.u64(self.lease.until.0);
        out.u64(self.told_ppm);
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut slots = QuotaSlots::NONE;
        for word in &mut slots.0 {
            *word = from.u64()?;
        }
        let (members, as_of, until) = (from.u32()?, Instant(from.u64()?), Instant(from.u64()?));
        Ok(Self { lease: QuotaShare { slots, members, as_of, until }, told_ppm: from.u64()? })
    }
}

impl State {
    /// A lease. One that follows from an older view is counted and dropped: it could give out what others have by now.
    pub(super) fn take_share(&mut self, lease: QuotaShare, cx: &mut Cx<'_>) {
        if self.share.as_of().is_some_and(|as_of| lease.as_of < as_of) || lease.until == Instant::NEVER {
            return self.stale(cx);
        }
        self.share.lease = lease;
        self.tell_share(cx);
    }

    /// Says what is in force when that has changed.
    pub(super) fn tell_share(&mut self, cx: &mut Cx<'_>) {
        let share_ppm = self.share.ppm(self.now, &self.config);
        if core::mem::replace(&mut self.share.told_ppm, share_ppm) != share_ppm {
            cx.effects.push(GatewayEffect::Event(GatewayEvent::QuotaShare { share_ppm }));
        }
    }

    /// May the tenant have one more request, of `tokens` at most, by this gateway's part of its quotas? `counted` when the request is one of
    /// its live ones already.
    pub(super) fn within_quota(&self, tenant: u32, tokens: u64, counted: bool) -> Result<(), OverQuota> {
        let id = self.ledger.id(tenant);
        let terms = &self.ledger.get(tenant).terms;
        let part = |quota| self.share.of(quota, id, self.now, &self.config);
        let requests = if terms.requests_max == u32::MAX { u64::MAX } else { u64::from(terms.requests_max) };
        let limits = (part(requests), part(terms.window_tokens_max));
        self.ledger.allows(tenant, tokens, counted, limits)
    }
}
