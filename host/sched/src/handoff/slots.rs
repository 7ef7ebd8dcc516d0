//! Where do a machine's transfers lie? A bounded table with stable places, and a short memory of the ones that are over.

use alloc::vec::Vec;

use penstock_base::codec::{DecodeError, Reader, Writer};
use penstock_base::limits::GATEWAYS_MAX;
use penstock_base::map::Map;
use penstock_base::{GatewayEpoch, TransferId};

use super::codec::Coded;

/// Transfers in places that do not change while they live.
#[derive(Clone, Debug)]
pub(super) struct Slots<T> {
    entries: Vec<Option<(TransferId, T)>>,
    vacant: Vec<u32>,
    by_id: Map<TransferId, u32>,
}

impl<T> Slots<T> {
    pub(super) fn new(places: u32) -> Self {
        Self {
            entries: (0..places).map(|_| None).collect(),
            vacant: (0..places).rev().collect(),
            by_id: Map::with_capacity(places as usize * 2),
        }
    }

    pub(super) fn len(&self) -> u32 {
        self.by_id.len() as u32
    }

    pub(super) fn places(&self) -> u32 {
        self.entries.len() as u32
    }

    pub(super) fn is_full(&self) -> bool {
        self.vacant.is_empty()
    }

    pub(super) fn place(&self, id: TransferId) -> Option<u32> {
        self.by_id.get(&id).copied()
    }

    /// The place that the next insertion takes.
    pub(super) fn next_place(&self) -> Option<u32> {
        self.vacant.last().copied()
    }

    /// The caller has asked for [`Self::next_place`]; a full table keeps what it has.
    pub(super) fn insert(&mut self, id: TransferId, entry: T) {
        if let Some(place) = self.vacant.pop() {
            self.entries[place as usize] = Some((id, entry));
            self.by_id.insert(id, place);
        }
    }

    pub(super) fn at(&mut self, place: u32) -> Option<(TransferId, &mut T)> {
        self.entries.get_mut(place as usize)?.as_mut().map(|(id, entry)| (*id, entry))
    }

    pub(super) fn get(&mut self, id: TransferId) -> Option<&mut T> {
        let place = self.place(id)?;
        self.at(place).map(|(_, entry)| entry)
    }

    pub(super) fn remove(&mut self, place: u32) -> Option<(TransferId, T)> {
        let (id, entry) = self.entries.get_mut(place as usize)?.take()?;
        self.by_id.remove(&id);
        self.vacant.push(place);
        Some((id, entry))
    }

    /// Writes entries and which place the next one takes.
    pub(super) fn encode(&self, out: &mut Writer, mut each: impl FnMut(&mut Writer, &T)) {
        out.list(self.entries.iter(), |w, entry| {
            w.option(entry.as_ref(), |w, (id, entry)| {
                id.put(w);
                each(w, entry);
            });
        });
        self.vacant.put(out);
    }

    /// Reads what [`Self::encode`] wrote with as many places.
    pub(super) fn decode(
        places: u32,
        from: &mut Reader<'_>,
        mut each: impl FnMut(&mut Reader<'_>) -> Result<T, DecodeError>,
    ) -> Result<Self, DecodeError> {
        const INVALID: DecodeError = DecodeError::Invalid("table of transfers");
        let mut to = Self::new(places);
        if from.count()? != places as usize {
            return Err(INVALID);
        }
        for place in 0..places {
            let entry = from.option(|r| Ok((TransferId::take(r)?, each(r)?)))?;
            if let Some((id, _)) = &entry
                && to.by_id.insert(*id, place).is_some()
            {
                return Err(INVALID);
            }
            to.entries[place as usize] = entry;
        }
        let vacant = Vec::<u32>::take(from)?;
        let mut sorted = vacant.clone();
        sorted.sort_unstable();
        let empty = (0..places).filter(|place| to.entries[*place as usize].is_none());
        if !sorted.iter().copied().eq(empty) {
            return Err(INVALID);
        }
        to.vacant.clear();
        to.vacant.extend(vacant);
        Ok(to)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TransferId, &T)> {
        self.entries.iter().flatten().map(|(id, entry)| (*id, entry))
    }
}

/// The last transfers that ended here, and what is answered about them. The oldest makes room.
#[derive(Clone, Debug)]
pub(super) struct Recent<T> {
    ended: Vec<(TransferId, T)>,
    next: usize,
    room: usize,
}

impl<T: Copy> Recent<T> {
    pub(super) fn new(room: usize) -> Self {
        Self { ended: Vec::with_capacity(room), next: 0, room }
    }

    pub(super) fn add(&mut self, id: TransferId, end: T) {
        if self.ended.len() < self.room {
            self.ended.push((id, end));
        } else if let Some(oldest) = self.ended.get_mut(self.next) {
            *oldest = (id, end);
            self.next = (self.next + 1) % self.room;
        }
    }

    pub(super) fn encode(&self, out: &mut Writer)
    where
        T: Coded,
    {
        out.list(self.ended.iter(), |w, (id, end)| {
            id.put(w);
            end.put(w);
        });
        out.count(self.next);
    }

    pub(super) fn decode(room: usize, from: &mut Reader<'_>) -> Result<Self, DecodeError>
    where
        T: Coded,
    {
        let ended = from.list(|r| Ok((TransferId::take(r)?, T::take(r)?)))?;
        let next = from.index()?;
        if ended.len() > room || next >= room.max(1) {
            return Err(DecodeError::Invalid("list of ended transfers"));
        }
        let mut to = Self::new(room);
        to.ended.extend(ended);
        to.next = next;
        Ok(to)
    }

    pub(super) fn get(&self, id: TransferId) -> Option<T> {
        self.ended.iter().rev().find(|(ended, _)| *ended == id).map(|(_, end)| *end)
    }
}

/// Incarnations of gateways that are known to be gone: their messages are dead.
#[derive(Clone, Debug, Default)]
pub(super) struct DeadGateways {
    epochs: Vec<GatewayEpoch>,
    next: usize,
}

impl DeadGateways {
    pub(super) fn add(&mut self, epoch: GatewayEpoch) {
        if self.contains(epoch) {
            return;
        }
        if self.epochs.len() < GATEWAYS_MAX {
            self.epochs.push(epoch);
        } else {
            self.epochs[self.next] = epoch;
            self.next = (self.next + 1) % GATEWAYS_MAX;
        }
    }

    /// It speaks again: what it says from now on is new.
    pub(super) fn remove(&mut self, epoch: GatewayEpoch) {
        // The oldest stands first again, so that the next one to leave is it.
        let oldest = self.next.min(self.epochs.len());
        self.epochs.rotate_left(oldest);
        self.next = 0;
        self.epochs.retain(|dead| *dead != epoch);
    }

    pub(super) fn encode(&self, out: &mut Writer) {
        self.epochs.put(out);
        out.count(self.next);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (epochs, next) = (Vec::<GatewayEpoch>::take(from)?, from.index()?);
        if epochs.len() > GATEWAYS_MAX || next >= GATEWAYS_MAX {
            return Err(DecodeError::Invalid("list of gateways"));
        }
        Ok(Self { epochs, next })
    }

    pub(super) fn contains(&self, epoch: GatewayEpoch) -> bool {
        self.epochs.contains(&epoch)
    }
}
