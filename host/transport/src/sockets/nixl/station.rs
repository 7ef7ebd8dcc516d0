//! NIXL's agents behind an endpoint: one whose memory peers reach, and one that posts the endpoint's own requests. They are two so
//! that the first can be replaced without a trace on the second: that is the fence.

use std::collections::BTreeMap;

use nixl_sys::{
    Agent, AgentConfig, MemType, MemoryRegion, NixlDescriptor, NixlError, NotificationMap, RegistrationHandle,
    XferDescList, XferOp, XferRequest, XferStatus,
};

use super::settings::NixlSettings;
use crate::sockets::posting::{Poster, Request, Wanted};
use crate::wire::{Reader, put_bytes};
use crate::{Descriptor, Direction, Gone, Layout, PeerId, REGIONS_MAX, Region, TransportError};

/// Longest metadata that are read: a few hundred bytes for each device.
const METADATA_BYTES_MAX: usize = 60 * 1024;

/// A region, as the bindings want it described.
#[derive(Debug)]
struct Described<'a>(&'a Region);

impl MemoryRegion for Described<'_> {
    unsafe fn as_ptr(&self) -> *const u8 {
        self.0.memory().base().as_ptr()
    }

    fn size(&self) -> usize {
        self.0.memory().bytes()
    }
}

impl NixlDescriptor for Described<'_> {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

/// An agent with the endpoint's regions registered.
struct Station {
    // The order in which they are dropped: registrations end before their agent, and the memory outlives both.
    _registrations: Vec<RegistrationHandle>,
    agent: Agent,
    regions: Vec<Region>,
}

impl Station {
    fn new(name: &str, regions: Vec<Region>, settings: &NixlSettings) -> Result<Self, TransportError> {
        // The endpoint's own thread does all the work, inside `poll`.
        let configuration =
            AgentConfig { enable_prog_thread: false, enable_listen_thread: false, ..AgentConfig::default() };
        let agent = Agent::new_configured(name, &configuration).map_err(|fault| unavailable("an agent", &fault))?;
        let plugin = &settings.plugin;
        let (_, mut parameters) =
            agent.get_plugin_params(plugin).map_err(|fault| unavailable(&format!("its plugin {plugin}"), &fault))?;
        for (key, value) in &settings.plugin_parameters {
            let set = parameters.set(key, value);
            set.map_err(|fault| unavailable(&format!("{key}={value} for its plugin"), &fault))?;
        }
        let backend = agent.create_backend(plugin, &parameters);
        backend.map_err(|fault| unavailable(&format!("a start of its plugin {plugin}"), &fault))?;
        let registrations = regions.iter().map(|region| agent.register_memory(&Described(region), None));
        let registrations =
            registrations.collect::<Result<_, _>>().map_err(|fault| unavailable("the regions", &fault))?;
        Ok(Self { _registrations: registrations, agent, regions })
    }
}

fn unavailable(what: &str, fault: &NixlError) -> TransportError {
    TransportError::Unavailable(format!("NIXL refuses {what}: {fault}"))
}

fn lost(doing: &str, fault: &NixlError) -> Gone {
    Gone::Unreachable(format!("NIXL, {doing}: {fault}"))
}

/// A peer as its card says.
struct Remote {
    agent: String,
    /// Where its regions begin in its own memory.
    bases: Vec<u64>,
    layouts: Vec<Layout>,
}

/// Both agents of an endpoint.
pub(super) struct Stations {
    /// Peers reach it. None after a fence, until the next peer is to be told of it.
    target: Option<Station>,
    source: Station,
    remotes: BTreeMap<PeerId, Remote>,
    settings: NixlSettings,
    /// Names no other agent has: a peer keeps what it knows under it.
    name: String,
    fences: u64,
}

impl Stations {
    pub(super) fn new(
        descriptor: &Descriptor,
        regions: Vec<Region>,
        settings: &NixlSettings,
    ) -> Result<Self, TransportError> {
        // Drawn at random beside the token, which is a secret.
        let unique = crate::sys::unguessable()?;
        let unique: String = unique.iter().map(|byte| format!("{byte:02x}")).collect();
        let name = format!("penstock-{}-{}-{unique}", descriptor.identity.endpoint, descriptor.identity.epoch);
        let source = Station::new(&format!("{name}-source"), regions, settings)?;
        let mut stations =
            Self { target: None, source, remotes: BTreeMap::new(), settings: settings.clone(), name, fences: 0 };
        stations.target()?;
        Ok(stations)
    }

    /// The agent that peers reach, made anew after a fence.
    fn target(&mut self) -> Result<&Station, TransportError> {
        let station = match self.target.take() {
            Some(station) => station,
            None => {
                let name = format!("{}-target-{}", self.name, self.fences);
                Station::new(&name, self.source.regions.clone(), &self.settings)?
            }
        };
        Ok(self.target.insert(station))
    }
}

impl Poster for Stations {
    fn card(&mut self) -> Result<Vec<u8>, TransportError> {
        let target = self.target()?;
        let metadata = target.agent.get_local_md().map_err(|fault| unavailable("its metadata", &fault))?;
        let mut card = Vec::with_capacity(metadata.len() + 16);
        card.push(target.regions.len() as u8);
        for region in &target.regions {
            card.extend_from_slice(&(region.memory().base().as_ptr() as u64).to_le_bytes());
        }
        put_bytes(&mut card, &metadata);
        Ok(card)
    }

    fn meet(&mut self, peer: PeerId, card: &[u8], layouts: &[Layout]) -> Result<(), Gone> {
        self.part(peer);
        let read = || -> Result<(Vec<u64>, &[u8]), TransportError> {
            let mut reader = Reader::new(card);
            let count = usize::from(reader.u8()?).min(REGIONS_MAX);
            let bases = (0..count).map(|_| reader.u64()).collect::<Result<_, _>>()?;
            let metadata = reader.bytes(METADATA_BYTES_MAX)?;
            reader.end()?;
            Ok((bases, metadata))
        };
        let (bases, metadata) = read().map_err(|_| Gone::Protocol("a card that is none"))?;
        if bases.len() != layouts.len() {
            return Err(Gone::Protocol("a card of other regions"));
        }
        let fits = |(base, layout): (&u64, &Layout)| {
            let bytes = layout.block_bytes.checked_mul(u64::from(layout.blocks));
            bytes.is_some_and(|bytes| base.checked_add(bytes).is_some())
        };
        if !bases.iter().zip(layouts).all(fits) {
            return Err(Gone::Protocol("a card of impossible addresses"));
        }
        let agent = self.source.agent.load_remote_md(metadata);
        let agent = agent.map_err(|fault| Gone::Unmappable(format!("NIXL cannot read its metadata: {fault}")))?;
        self.remotes.insert(peer, Remote { agent, bases, layouts: layouts.to_vec() });
        Ok(())
    }

    fn part(&mut self, peer: PeerId) {
        if let Some(remote) = self.remotes.remove(&peer) {
            // An agent that it does not know any more is what is wanted.
            let _ = self.source.agent.invalidate_remote_md(&remote.agent);
        }
    }

    fn post(&mut self, wanted: &Wanted<'_>) -> Result<Box<dyn Request>, Gone> {
        let remote = self.remotes.get(&wanted.peer).ok_or(Gone::Protocol("no card of this peer"))?;
        let local = self.source.regions.get(usize::from(wanted.local)).ok_or(Gone::Protocol("no such region"))?;
        let there = usize::from(wanted.remote);
        let (base, layout) =
            remote.bases.get(there).zip(remote.layouts.get(there)).ok_or(Gone::Protocol("no such region"))?;
        let (here, here_bytes) = (local.memory().base().as_ptr() as u64, local.memory().bytes() as u64);
        let there_bytes = layout.block_bytes * u64::from(layout.blocks);
        let lists = || XferDescList::new(MemType::Dram).map_err(|fault| lost("a list of blocks", &fault));
        let (mut ours, mut theirs) = (lists()?, lists()?);
        for stretch in wanted.stretches {
            // Checked when the operation was admitted; this is the last look before memory is moved by address.
            debug_assert!(stretch.local + stretch.bytes <= here_bytes && stretch.remote + stretch.bytes <= there_bytes);
            ours.add_desc((here + stretch.local) as usize, stretch.bytes as usize, 0);
            theirs.add_desc((base + stretch.remote) as usize, stretch.bytes as usize, 0);
        }
        let way = match wanted.direction {
            Direction::Write => XferOp::Write,
            Direction::Read => XferOp::Read,
        };
        let agent = &self.source.agent;
        let request = agent.create_xfer_req(way, &ours, &theirs, &remote.agent, None);
        let request = request.map_err(|fault| lost("making a request", &fault))?;
        let is_open = agent.post_xfer_req(&request, None).map_err(|fault| lost("posting a request", &fault))?;
        Ok(Box::new(Posted { request, agent: agent.clone(), is_open, _memory: self.source.regions.clone() }))
    }

    fn serve(&mut self) {
        let Some(target) = &self.target else { return };
        // Asking for notifications is what makes an agent without a thread work. None is meant for us; what came is dropped with
        // the map.
        if let Ok(mut map) = NotificationMap::new() {
            let _ = target.agent.get_notifications(&mut map, None);
        }
    }

    fn fence(&mut self) {
        self.target = None;
        self.fences += 1;
    }
}

/// A request that NIXL has taken.
struct Posted {
    // Dropped first: the request ends before the memory that it may touch can go.
    request: XferRequest,
    agent: Agent,
    is_open: bool,
    _memory: Vec<Region>,
}

impl Request for Posted {
    fn is_final(&mut self) -> Result<bool, Gone> {
        if self.is_open {
            let status = self.agent.get_xfer_status(&self.request).map_err(|fault| lost("moving bytes", &fault))?;
            self.is_open = status == XferStatus::InProgress;
        }
        Ok(!self.is_open)
    }
}
