//! How much of the cache does each tenant hold, and who holds more than allowed?

use alloc::vec::Vec;

use penstock_base::TenantId;
use penstock_base::codec::{DecodeError, Reader, Writer};

use crate::index::HashIndex;
use crate::list::{Links, List};
use crate::ordered::Root;

#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    pub(crate) id: TenantId,
    /// Blocks stored in its name, used or not. At 0 the entry is given up.
    stored: u32,
    /// Of these, the ones nobody references: what the quota bounds.
    cached: u32,
    /// Hard quota; [`u64::MAX`] is none.
    quota: u64,
    /// Its leaves, cheapest first.
    pub(crate) leaves: Root,
}

/// The tenants with stored blocks. Entries are reused; room is fixed.
#[derive(Clone, Debug)]
pub(crate) struct Tenants {
    entries: Vec<Tenant>,
    capacity: u32,
    by_id: HashIndex,
    /// Entries without blocks, last given up first.
    unused: Vec<u32>,
    links: Links,
    /// Over quota and with a leaf that can go.
    over: List,
}

impl Tenants {
    pub(crate) const ENTRY_BYTES_MAX: usize =
        size_of::<Tenant>() + size_of::<u32>() + HashIndex::ENTRY_BYTES_MAX + Links::ENTRY_BYTES;

    pub(crate) fn new(capacity: u32) -> Self {
        let room = capacity as usize;
        Self {
            entries: Vec::with_capacity(room),
            capacity,
            by_id: HashIndex::new(capacity),
            unused: Vec::with_capacity(room),
            links: Links::new(room),
            over: List::default(),
        }
    }

    pub(crate) fn get(&self, t: u32) -> &Tenant {
        &self.entries[t as usize]
    }

    pub(crate) fn find(&self, id: TenantId) -> Option<&Tenant> {
        self.entry(id).map(|t| self.get(t))
    }

    fn entry(&self, id: TenantId) -> Option<u32> {
        self.by_id.find(id.0, |t| self.entries[t as usize].id == id)
    }

    pub(crate) fn leaves_mut(&mut self, t: u32) -> &mut Root {
        &mut self.entries[t as usize].leaves
    }

    /// One more block is stored for `id`, whose quota is `quota` from now on. None when there is no room for another tenant.
    pub(crate) fn store(&mut self, id: TenantId, quota: u64) -> Option<u32> {
        let t = match self.entry(id) {
            Some(t) => t,
            None => {
                let fresh = Tenant { id, stored: 0, cached: 0, quota, leaves: Root::default() };
                let t = match self.unused.pop() {
                    Some(t) => {
                        self.entries[t as usize] = fresh;
                        t
                    }
                    None if self.entries.len() < self.capacity as usize => {
                        self.entries.push(fresh);
                        self.entries.len() as u32 - 1
                    }
                    None => return None,
                };
                self.by_id.insert(id.0, t);
                t
            }
        };
        let tenant = &mut self.entries[t as usize];
        tenant.stored += 1;
        tenant.quota = quota;
        self.refresh(t);
        Some(t)
    }

    /// One block less is stored for this tenant. It is not counted as cached any more.
    pub(crate) fn unstore(&mut self, t: u32) {
        let tenant = &mut self.entries[t as usize];
        tenant.stored -= 1;
        if tenant.stored == 0 {
            debug_assert!(tenant.cached == 0 && tenant.leaves.is_empty());
            let (id, entries) = (tenant.id, &self.entries);
            self.by_id.remove(id.0, t, |e| entries[e as usize].id.0);
            self.unused.push(t);
        }
    }

    pub(crate) fn add_cached(&mut self, t: u32) {
        self.entries[t as usize].cached += 1;
        self.refresh(t);
    }

    pub(crate) fn sub_cached(&mut self, t: u32) {
        self.entries[t as usize].cached -= 1;
        self.refresh(t);
    }

    /// Keeps the list of offenders; call it when the count, the quota or the leaves of a tenant changed.
    pub(crate) fn refresh(&mut self, t: u32) {
        let tenant = &self.entries[t as usize];
        let over = u64::from(tenant.cached) > tenant.quota && !tenant.leaves.is_empty();
        match (over, self.links.contains(t)) {
            (true, false) => self.links.push_back(&mut self.over, t),
            (false, true) => self.links.remove(&mut self.over, t),
            _ => {}
        }
    }

    /// The tenant that has been over its quota for longest and has a block that can go.
    pub(crate) fn first_over(&self) -> Option<&Tenant> {
        self.over.first().map(|t| self.get(t))
    }

    /// All entries, given up or not.
    pub(crate) fn entries(&self) -> &[Tenant] {
        &self.entries
    }

    /// Is this entry listed as an offender?
    pub(crate) fn is_over(&self, t: u32) -> bool {
        self.links.contains(t)
    }

    pub(crate) fn reserved_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Tenant>()
            + self.unused.capacity() * size_of::<u32>()
            + self.by_id.reserved_bytes()
            + self.links.reserved_bytes()
    }

    pub(crate) fn encode(&self, out: &mut Writer) {
        out.list(self.entries.iter(), |w, t| {
            w.u64(t.id.0);
            w.u32(t.stored);
            w.u32(t.cached);
            w.u64(t.quota);
        });
        out.list(self.unused.iter(), |w, t| w.u32(*t));
        self.links.encode(&self.over, out);
    }

    /// Reads the entries; their leaves are added by whoever knows the blocks.
    pub(crate) fn decode(capacity: u32, from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut tenants = Self::new(capacity);
        let entries = from.list(|r| {
            let (id, stored, cached, quota) = (TenantId(r.u64()?), r.u32()?, r.u32()?, r.u64()?);
            Ok(Tenant { id, stored, cached, quota, leaves: Root::default() })
        })?;
        let unused = from.list(Reader::u32)?;
        let empty = entries.iter().filter(|t| t.stored == 0).count();
        if entries.len() > capacity as usize || unused.len() != empty {
            return Err(DecodeError::Invalid("tenant count"));
        }
        let mut once = unused.clone();
        once.sort_unstable();
        once.dedup();
        if once.len() != unused.len() {
            return Err(DecodeError::Invalid("unused tenant"));
        }
        for t in &unused {
            if entries.get(*t as usize).is_none_or(|t| t.stored != 0 || t.cached != 0) {
                return Err(DecodeError::Invalid("unused tenant"));
            }
        }
        tenants.entries.extend(entries);
        for t in 0..tenants.entries.len() as u32 {
            let Tenant { id, stored, .. } = *tenants.get(t);
            if stored > 0 {
                if tenants.entry(id).is_some() {
                    return Err(DecodeError::Invalid("tenant twice"));
                }
                tenants.by_id.insert(id.0, t);
            }
        }
        tenants.unused.extend_from_slice(&unused);
        tenants.over = tenants.links.decode(from)?;
        if tenants.links.iter(&tenants.over).any(|t| t as usize >= tenants.entries.len()) {
            return Err(DecodeError::Invalid("tenant over quota"));
        }
        Ok(tenants)
    }
}

impl Tenant {
    pub(crate) fn stored(&self) -> u32 {
        self.stored
    }
    pub(crate) fn cached(&self) -> u32 {
        self.cached
    }
    pub(crate) fn quota(&self) -> u64 {
        self.quota
    }
}
