//! Answers on one transport, so that the other end can be tried from another process, network namespace or host.
//!
//! `transport-probe tcp ADDRESS:PORT | nixl ADDRESS:PORT | memfd PATH [--block-bytes N] [--blocks N] [--endpoint N] [--epoch N]
//! [--to DESCRIPTOR] [--under GRANT] [--grant GRANT --grantee ENDPOINT.EPOCH]`
//!
//! The first line of output is the descriptor in hexadecimal. Byte `j` of block `i` holds `(31 i + 7 j) mod 251` at first. Each
//! write that lands is answered with `landed ENDPOINT OP BYTES SUM`, where `SUM` is the CRC-32C of the whole pool, in
//! hexadecimal; each peer that goes with `left ENDPOINT`. With `--to` it writes its whole pool to that endpoint, once, under a
//! grant if one is named, and says `ended` and how. With `--grant` it is guarded, and grants its whole pool to one peer. It ends when its input is closed. NIXL's library is looked for in the folder `PENSTOCK_NIXL` if that is set.

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock_transport::{
    Direction, Event, GrantId, Limits, Memfd, OpId, PeerId, Region, Setup, Span, Tcp, Transfer, Transport,
};

static IS_OVER: AtomicBool = AtomicBool::new(false);

const USAGE: &str = "usage: transport-probe tcp ADDRESS:PORT | nixl ADDRESS:PORT | memfd PATH [--block-bytes N] [--blocks N] \
                     [--endpoint N] [--epoch N] [--to DESCRIPTOR] [--under GRANT] [--grant GRANT --grantee ENDPOINT.EPOCH]";

struct Wanted {
    kind: String,
    address: String,
    block_bytes: usize,
    blocks: u32,
    identity: PeerId,
    /// The descriptor of an endpoint to write to.
    to: Option<Vec<u8>>,
    /// Under which grant.
    under: Option<GrantId>,
    /// What this endpoint grants, and to whom.
    grant: Option<GrantId>,
    grantee: PeerId,
}

fn main() -> Result<(), Box<dyn Error>> {
    by_nixl::prepare();
    let wanted = arguments(std::env::args().skip(1))?;
    let region = Region::shared(wanted.block_bytes, wanted.blocks)?;
    let mut block = vec![0; wanted.block_bytes];
    for i in 0..wanted.blocks {
        block.iter_mut().enumerate().for_each(|(j, byte)| *byte = ((31 * i as usize + 7 * j) % 251) as u8);
        region.fill(i, &block)?;
    }
    let setup = Setup {
        identity: wanted.identity,
        regions: vec![region.clone()],
        is_guarded: wanted.grant.is_some(),
        limits: Limits::default(),
    };
    let mut transport: Box<dyn Transport> = match wanted.kind.as_str() {
        "tcp" => Box::new(Tcp::bind(setup, wanted.address.parse()?, None)?),
        "nixl" => by_nixl::endpoint(setup, wanted.address.parse()?)?,
        "memfd" => Box::new(Memfd::bind(setup, Path::new(&wanted.address))?),
        other => return Err(format!("no such transport: {other}; {USAGE}").into()),
    };
    if let Some(grant) = wanted.grant {
        let all = 0..wanted.blocks;
        transport.grant(wanted.grantee, grant, 0, std::slice::from_ref(&all))?;
    }
    let descriptor: String = transport.descriptor().encode().iter().map(|byte| format!("{byte:02x}")).collect();
    say(&descriptor)?;
    std::thread::spawn(|| {
        // Whether it ends well or badly, nobody is there to be answered any more.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        IS_OVER.store(true, Ordering::Release);
    });
    let mut to = wanted.to.map(|descriptor| transport.connect(&descriptor)).transpose()?;
    let mut events = Vec::new();
    while !IS_OVER.load(Ordering::Acquire) {
        transport.poll(Duration::from_millis(20), &mut events);
        for event in events.drain(..) {
            match event {
                Event::Landed { peer, op, bytes } => {
                    say(&format!("landed {} {op} {bytes} {:08x}", peer.endpoint, sum(&region)?))?;
                }
                Event::Left { peer } => say(&format!("left {}", peer.endpoint))?,
                Event::Connected { peer } if to.take_if(|wanted| *wanted == peer).is_some() => {
                    let spans = vec![Span { local: 0, remote: 0, blocks: wanted.blocks }];
                    let deadline = Instant::now() + Duration::from_secs(60);
                    let (op, direction) = (OpId(1), Direction::Write);
                    let transfer = Transfer { op, peer, direction, local: 0, remote: 0, spans, deadline };
                    match wanted.under {
                        Some(grant) => transport.start_under(grant, transfer)?,
                        None => transport.start(transfer)?,
                    }
                }
                Event::Ended { op, outcome, .. } => say(&format!("ended {op} {outcome:?}"))?,
                _ => {}
            }
        }
    }
    drop(transport);
    by_nixl::leave()
}

#[cfg(feature = "nixl")]
mod by_nixl {
    use std::error::Error;
    use std::net::SocketAddr;
    use std::sync::OnceLock;

    use penstock_transport::{Nixl, NixlSettings, Setup, Transport, leave_with_nixl};

    static SETTINGS: OnceLock<NixlSettings> = OnceLock::new();

    pub fn prepare() {
        let library_dir = std::env::var_os("PENSTOCK_NIXL").map(Into::into);
        let mut settings = NixlSettings { library_dir, ..NixlSettings::default() };
        // SAFETY: the process has no other thread yet.
        unsafe { settings.apply() };
        SETTINGS.get_or_init(|| settings);
    }

    pub fn endpoint(setup: Setup, at: SocketAddr) -> Result<Box<dyn Transport>, Box<dyn Error>> {
        let settings = SETTINGS.get().ok_or("it was prepared first")?;
        Ok(Box::new(Nixl::bind(setup, settings, at, None)?))
    }

    pub fn leave() -> ! {
        leave_with_nixl(0)
    }
}

#[cfg(not(feature = "nixl"))]
mod by_nixl {
    use std::error::Error;
    use std::net::SocketAddr;

    use penstock_transport::{Setup, Transport};

    pub fn prepare() {}

    pub fn endpoint(_: Setup, _: SocketAddr) -> Result<Box<dyn Transport>, Box<dyn Error>> {
        Err("built without NIXL: build with the feature `nixl`".into())
    }

    pub fn leave() -> Result<(), Box<dyn Error>> {
        Ok(())
    }
}

fn arguments(mut given: impl Iterator<Item = String>) -> Result<Wanted, Box<dyn Error>> {
    let (kind, address) = (given.next().ok_or(USAGE)?, given.next().ok_or(USAGE)?);
    let identity = PeerId { endpoint: 2, epoch: 1 };
    let mut wanted = Wanted {
        kind,
        address,
        block_bytes: 65_536,
        blocks: 1_024,
        identity,
        to: None,
        under: None,
        grant: None,
        grantee: identity,
    };
    while let Some(option) = given.next() {
        let value = given.next().ok_or(USAGE)?;
        match option.as_str() {
            "--block-bytes" => wanted.block_bytes = value.parse()?,
            "--blocks" => wanted.blocks = value.parse()?,
            "--endpoint" => wanted.identity.endpoint = value.parse()?,
            "--to" => {
                let byte = |at: usize| value.get(at..at + 2).map(|digits| u8::from_str_radix(digits, 16));
                let bytes = (0..value.len()).step_by(2).map(byte);
                wanted.to = Some(bytes.collect::<Option<Result<_, _>>>().ok_or(USAGE)??);
            }
            "--under" => wanted.under = Some(GrantId(value.parse()?)),
            "--grant" => wanted.grant = Some(GrantId(value.parse()?)),
            "--grantee" => {
                let (endpoint, epoch) = value.split_once('.').ok_or(USAGE)?;
                wanted.grantee = PeerId { endpoint: endpoint.parse()?, epoch: epoch.parse()? };
            }
            "--epoch" => wanted.identity.epoch = value.parse()?,
            _ => return Err(format!("unknown option {option}; {USAGE}").into()),
        }
    }
    Ok(wanted)
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

fn sum(region: &Region) -> Result<u32, Box<dyn Error>> {
    let mut block = vec![0; region.block_bytes()];
    let mut sum = 0;
    for i in 0..region.blocks() {
        region.read(i, &mut block)?;
        sum = crc32c::crc32c_append(sum, &block);
    }
    Ok(sum)
}
