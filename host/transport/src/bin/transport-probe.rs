//! Answers on one transport, so that the other end can be tried from another process, network namespace or host.
//!
//! `transport-probe tcp ADDRESS:PORT | memfd PATH [--block-bytes N] [--blocks N] [--endpoint N] [--epoch N]`
//!
//! The first line of output is the descriptor in hexadecimal. Byte `j` of block `i` holds `(31 i + 7 j) mod 251` at first. Each
//! write that lands is answered with `landed ENDPOINT OP BYTES SUM`, where `SUM` is the CRC-32C of the whole pool, in
//! hexadecimal; each peer that goes with `left ENDPOINT`. It ends when its input is closed.

use std::error::Error;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use penstock_transport::{Event, Limits, Memfd, PeerId, Region, Setup, Tcp, Transport};

static IS_OVER: AtomicBool = AtomicBool::new(false);

const USAGE: &str =
    "usage: transport-probe tcp ADDRESS:PORT | memfd PATH [--block-bytes N] [--blocks N] [--endpoint N] [--epoch N]";

struct Wanted {
    kind: String,
    address: String,
    block_bytes: usize,
    blocks: u32,
    identity: PeerId,
}

fn main() -> Result<(), Box<dyn Error>> {
    let wanted = arguments(std::env::args().skip(1))?;
    let region = Region::shared(wanted.block_bytes, wanted.blocks)?;
    let mut block = vec![0; wanted.block_bytes];
    for i in 0..wanted.blocks {
        block.iter_mut().enumerate().for_each(|(j, byte)| *byte = ((31 * i as usize + 7 * j) % 251) as u8);
        region.fill(i, &block)?;
    }
    let setup = Setup { identity: wanted.identity, regions: vec![region.clone()], limits: Limits::default() };
    let mut transport: Box<dyn Transport> = match wanted.kind.as_str() {
        "tcp" => Box::new(Tcp::bind(setup, wanted.address.parse()?, None)?),
        "memfd" => Box::new(Memfd::bind(setup, Path::new(&wanted.address))?),
        other => return Err(format!("no such transport: {other}; {USAGE}").into()),
    };
    let descriptor: String = transport.descriptor().encode().iter().map(|byte| format!("{byte:02x}")).collect();
    say(&descriptor)?;
    std::thread::spawn(|| {
        // Whether it ends well or badly, nobody is there to be answered any more.
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        IS_OVER.store(true, Ordering::Release);
    });
    let mut events = Vec::new();
    while !IS_OVER.load(Ordering::Acquire) {
        transport.poll(Duration::from_millis(20), &mut events);
        for event in events.drain(..) {
            match event {
                Event::Landed { peer, op, bytes } => {
                    say(&format!("landed {} {op} {bytes} {:08x}", peer.endpoint, sum(&region)?))?;
                }
                Event::Left { peer } => say(&format!("left {}", peer.endpoint))?,
                _ => {}
            }
        }
    }
    Ok(())
}

fn arguments(mut given: impl Iterator<Item = String>) -> Result<Wanted, Box<dyn Error>> {
    let (kind, address) = (given.next().ok_or(USAGE)?, given.next().ok_or(USAGE)?);
    let identity = PeerId { endpoint: 2, epoch: 1 };
    let mut wanted = Wanted { kind, address, block_bytes: 65_536, blocks: 1_024, identity };
    while let Some(option) = given.next() {
        let value = given.next().ok_or(USAGE)?;
        match option.as_str() {
            "--block-bytes" => wanted.block_bytes = value.parse()?,
            "--blocks" => wanted.blocks = value.parse()?,
            "--endpoint" => wanted.identity.endpoint = value.parse()?,
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
