//! What may each tenant still use, and what has it used? Windows of tokens, reservations, guarantees and what may be lent.
//!
//! A reservation is taken when a request enters the queue and given back exactly once, at settlement, when what it really used is
//! charged. Used = charged in this window + reserved now, so work in flight counts in every window that it touches.

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::{Duration, Instant, TenantId, TenantTerms};

use super::table::Table;

/// One tenant with live work, or without it and remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Tenant {
    /// Its terms, as the last arrival brought them.
    pub terms: TenantTerms,
    /// Charged in this window, at settlements.
    pub charged_tokens: u64,
    /// Reserved by live requests.
    pub reserved_tokens: u64,
    /// Deferred, waiting and dispatched requests, settling ones included.
    pub live_requests: u32,
    /// Waiting ones.
    pub queued_requests: u32,
    /// Their input tokens.
    pub queued_tokens: u64,
    /// Dispatched ones, settling ones included.
    pub running_requests: u32,
    /// Blocks reserved for them.
    pub reserved_blocks: u64,
}

impl Tenant {
    /// Charged or reserved.
    pub fn used_tokens(&self) -> u64 {
        self.charged_tokens.saturating_add(self.reserved_tokens)
    }

    /// Used beyond the guarantee, by tenants that take part in lending.
    pub fn borrowed_tokens(&self) -> u64 {
        let takes_part = self.terms.guaranteed_tokens > 0 || self.terms.borrow_tokens_max > 0;
        if takes_part { self.used_tokens().saturating_sub(self.terms.guaranteed_tokens) } else { 0 }
    }

    /// Of its guarantee, not used.
    pub fn unused_guarantee(&self) -> u64 {
        self.terms.guaranteed_tokens.saturating_sub(self.used_tokens())
    }

    /// It waits although it is below its guarantee.
    pub fn is_waiting_lender(&self) -> bool {
        self.queued_requests > 0 && self.unused_guarantee() > 0
    }
}

/// Sums over all tenants, kept as they change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Sums {
    unused_guarantee: u128,
    borrowed: u128,
    waiting_lenders: u32,
}

impl Sums {
    fn add(&mut self, tenant: &Tenant) {
        self.unused_guarantee += u128::from(tenant.unused_guarantee());
        self.borrowed += u128::from(tenant.borrowed_tokens());
        self.waiting_lenders += u32::from(tenant.is_waiting_lender());
    }

    fn sub(&mut self, tenant: &Tenant) {
        self.unused_guarantee -= u128::from(tenant.unused_guarantee());
        self.borrowed -= u128::from(tenant.borrowed_tokens());
        self.waiting_lenders -= u32::from(tenant.is_waiting_lender());
    }
}

/// Why a request is over its tenant's quota.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum OverQuota {
    /// As many requests as it may have are live.
    Requests,
    /// The window's tokens are used or reserved.
    Tokens,
}

/// All tenants of this gateway.
#[derive(Clone, Debug)]
pub(super) struct Ledger {
    tenants: Table<TenantId, Tenant>,
    sums: Sums,
    /// Length of a window.
    window: Duration,
    /// Which window the charges are of: windows are counted from the origin of time.
    window_number: u64,
}

impl Ledger {
    /// No tenant yet.
    pub fn new(tenants_max: usize, window: Duration, now: Instant) -> Self {
        let window = Duration(window.0.max(1));
        let window_number = now.0 / window.0;
        Self { tenants: Table::with_capacity(tenants_max), sums: Sums::default(), window, window_number }
    }

    /// Opens the window that `now` lies in: charges of the last one are over, reservations stay.
    pub fn roll(&mut self, now: Instant) {
        let number = now.0 / self.window.0;
        if number == self.window_number {
            return;
        }
        self.window_number = number;
        for slot in 0..self.tenants.slots_end() {
            if self.tenants.get(slot).is_some() {
                self.change(slot, |tenant| tenant.charged_tokens = 0);
            }
        }
    }

    /// Time to the end of the window.
    pub fn window_left(&self, now: Instant) -> Duration {
        Duration(self.window.0 - now.0 % self.window.0)
    }

    /// The tenant's slot, with its newest terms. `None` when the table is full of tenants with live work.
    pub fn open(&mut self, id: TenantId, terms: &TenantTerms) -> Option<u32> {
        let slot = match self.tenants.find(&id) {
            Some(slot) => slot,
            None => {
                let inserted = self.tenants.insert(id, Tenant::default())?;
                if let Some(gone) = inserted.evicted {
                    self.sums.sub(&gone.value);
                }
                self.tenants.unpin(inserted.slot);
                inserted.slot
            }
        };
        self.tenants.touch(slot);
        self.change(slot, |tenant| tenant.terms = *terms);
        Some(slot)
    }

    /// One tenant.
    pub fn get(&self, slot: u32) -> &Tenant {
        &self.tenants[slot]
    }

    /// Is there a tenant in that slot?
    pub fn knows(&self, slot: u32) -> bool {
        self.tenants.get(slot).is_some()
    }

    /// The tenant with that id.
    pub fn find(&self, id: TenantId) -> Option<&Tenant> {
        self.tenants.find(&id).map(|slot| &self.tenants[slot])
    }

    /// All tenants.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Tenant)> {
        self.tenants.iter()
    }

    /// Changes one tenant and every sum that depends on it.
    pub fn change(&mut self, slot: u32, change: impl FnOnce(&mut Tenant)) {
        let tenant = &mut self.tenants[slot];
        self.sums.sub(tenant);
        change(tenant);
        self.sums.add(tenant);
        if tenant.live_requests > 0 {
            self.tenants.pin(slot);
        } else {
            self.tenants.unpin(slot);
        }
    }

    /// Whose slot it is.
    pub fn id(&self, slot: u32) -> TenantId {
        self.tenants.key(slot).unwrap_or_default()
    }

    /// May the tenant have one more request, of `tokens` at most, when it may have so many requests at once and tokens in a window?
    /// `counted` when the request is one of its live ones already.
    pub fn allows(
        &self,
        slot: u32,
        tokens: u64,
        counted: bool,
        (requests, window): (u64, u64),
    ) -> Result<(), OverQuota> {
        let tenant = self.get(slot);
        if !counted && u64::from(tenant.live_requests) >= requests {
            return Err(OverQuota::Requests);
        }
        if tenant.used_tokens().saturating_add(tokens) > window {
            return Err(OverQuota::Tokens);
        }
        Ok(())
    }

    /// Unused guarantee of others that nobody has borrowed yet.
    pub fn lendable_tokens(&self, slot: Option<u32>) -> u64 {
        let own = slot.map_or(0, |slot| u128::from(self.get(slot).unused_guarantee()));
        let free = (self.sums.unused_guarantee - own).saturating_sub(self.sums.borrowed);
        u64::try_from(free).unwrap_or(u64::MAX)
    }

    /// Does another tenant wait although it is below its guarantee?
    pub fn is_lender_waiting(&self, slot: Option<u32>) -> bool {
        let own = slot.is_some_and(|slot| self.get(slot).is_waiting_lender());
        self.sums.waiting_lenders > u32::from(own)
    }

    /// The sums equal a walk, and tenants with live work are pinned.
    pub fn check(&self) -> Result<(), &'static str> {
        self.tenants.check()?;
        let mut sums = Sums::default();
        for (_, tenant) in self.tenants.iter() {
            sums.add(tenant);
        }
        if sums == self.sums { Ok(()) } else { Err("ledger: a sum differs from the walk over tenants") }
    }

    /// Writes the state.
    pub fn encode(&self, out: &mut Writer) {
        out.u64(self.window_number);
        self.tenants.encode(out, |out, id, tenant| {
            out.u64(id.0);
            tenant.terms.encode(out);
            out.u64(tenant.charged_tokens);
            out.u64(tenant.reserved_tokens);
            out.u32(tenant.live_requests);
            out.u32(tenant.queued_requests);
            out.u64(tenant.queued_tokens);
            out.u32(tenant.running_requests);
            out.u64(tenant.reserved_blocks);
        });
    }

    /// Reads what [`Self::encode`] wrote.
    pub fn decode(from: &mut Reader<'_>, tenants_max: usize, window: Duration) -> Result<Self, DecodeError> {
        let mut ledger = Self::new(tenants_max, window, Instant::ZERO);
        ledger.window_number = from.u64()?;
        ledger.tenants = Table::decode(from, tenants_max, |from| {
            let id = TenantId(from.u64()?);
            let tenant = Tenant {
                terms: TenantTerms::decode(from)?,
                charged_tokens: from.u64()?,
                reserved_tokens: from.u64()?,
                live_requests: from.u32()?,
                queued_requests: from.u32()?,
                queued_tokens: from.u64()?,
                running_requests: from.u32()?,
                reserved_blocks: from.u64()?,
            };
            Ok((id, tenant))
        })?;
        for (_, tenant) in ledger.tenants.iter() {
            ledger.sums.add(tenant);
        }
        Ok(ledger)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(guaranteed: u64, limit: u64) -> TenantTerms {
        TenantTerms {
            guaranteed_tokens: guaranteed,
            borrow_tokens_max: 1_000,
            window_tokens_max: limit,
            requests_max: 2,
            ..TenantTerms::default()
        }
    }

    #[test]
    fn a_reservation_counts_until_it_is_settled_and_survives_the_window() {
        let mut ledger = Ledger::new(4, Duration::from_s(60), Instant::ZERO);
        let a = ledger.open(TenantId(1), &terms(100, 150)).expect("room");
        ledger.change(a, |t| {
            t.live_requests = 1;
            t.reserved_tokens = 120;
        });
        assert_eq!(ledger.allows(a, 30, false, (2, 150)), Ok(()));
        assert_eq!(ledger.allows(a, 31, false, (2, 150)), Err(OverQuota::Tokens));
        // Settled with 40 real tokens: 80 come back.
        ledger.change(a, |t| {
            t.reserved_tokens = 0;
            t.charged_tokens = 40;
        });
        assert_eq!(ledger.allows(a, 110, false, (2, 150)), Ok(()));
        ledger.change(a, |t| t.reserved_tokens = 50);
        ledger.roll(Instant(60_000_000_000));
        assert_eq!(ledger.get(a).used_tokens(), 50, "the charge is over, the reservation is not");
        ledger.change(a, |t| t.live_requests = 2);
        assert_eq!(ledger.allows(a, 1, false, (2, 150)), Err(OverQuota::Requests));
        assert_eq!(ledger.allows(a, 1, true, (2, 150)), Ok(()), "it is one of the two");
        ledger.check().expect("sound");
    }

    #[test]
    fn what_is_lent_is_not_lent_twice_and_a_waiting_lender_shows() {
        let mut ledger = Ledger::new(4, Duration::from_s(60), Instant::ZERO);
        let a = ledger.open(TenantId(1), &terms(100, u64::MAX)).expect("room");
        let b = ledger.open(TenantId(2), &terms(50, u64::MAX)).expect("room");
        assert_eq!(ledger.lendable_tokens(Some(b)), 100);
        // b uses 50 of its own and borrows 30 of a's 100.
        ledger.change(b, |t| t.charged_tokens = 80);
        assert_eq!((ledger.lendable_tokens(Some(b)), ledger.get(b).borrowed_tokens()), (70, 30));
        assert!(!ledger.is_lender_waiting(Some(b)));
        ledger.change(a, |t| t.queued_requests = 1);
        assert!(ledger.is_lender_waiting(Some(b)) && !ledger.is_lender_waiting(Some(a)));
    }

    #[test]
    fn the_table_is_bounded_and_live_tenants_stay() {
        let mut ledger = Ledger::new(2, Duration::from_s(60), Instant::ZERO);
        let a = ledger.open(TenantId(1), &terms(10, 10)).expect("room");
        ledger.change(a, |t| t.live_requests = 1);
        ledger.open(TenantId(2), &terms(10, 10)).expect("room");
        let c = ledger.open(TenantId(3), &terms(10, 10)).expect("2 makes room");
        assert!(ledger.find(TenantId(2)).is_none());
        ledger.change(c, |t| t.live_requests = 1);
        assert_eq!(ledger.open(TenantId(4), &terms(10, 10)), None);
        ledger.check().expect("sound");
    }
}
