//! How fast does each kind move KV on this machine, beside a plain copy and a plain TCP stream in the same run, and what do grants cost?
//!
//! `cargo run --release -p penstock-transport --example transfers [-- KIND...]`. The other end is a thread for `reference` and a process for the
//! others. With `--features nixl` and `PENSTOCK_NIXL` set to the folder of its library, NIXL as well. Figures are printed, never judged.

use std::error::Error;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use penstock_transport::{
    ByReference, Direction, Event, GrantId, Kind, Limits, Memfd, OpId, PeerId, Region, Setup, Span, Tcp, Transfer,
    Transport,
};

const BLOCK_BYTES: usize = 64 * 1024;
const BLOCKS: u32 = 1_024;
/// Blocks moved by one transfer, and how often.
const SIZES: [(u32, usize); 6] = [(1, 300), (4, 200), (16, 100), (64, 60), (256, 30), (1_024, 12)];

/// Of all blocks of a guarded end.
const GRANT: GrantId = GrantId(1);

type Failed = Box<dyn Error>;

fn main() -> Result<(), Failed> {
    by_nixl::prepare();
    let result = run();
    if let Err(fault) = &result {
        eprintln!("{fault}");
    }
    by_nixl::leave(i32::from(result.is_err()))
}

fn run() -> Result<(), Failed> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, kind, address, guard] = arguments.as_slice()
        && word == "serve"
    {
        return serve(kind, address, guard == "guarded");
    }
    println!("{:<40} {:>8}  {:>12} {:>9} {:>9}", "figure: what", "KiB", "p50 us", "GB/s p50", "GB/s best");
    plain_copy();
    plain_tcp()?;
    let mut kinds = vec![Kind::Reference, Kind::Memfd, Kind::Tcp];
    kinds.extend(std::env::var_os("PENSTOCK_NIXL").map(|_| Kind::Nixl));
    kinds.retain(|kind| arguments.is_empty() || arguments.contains(&kind.to_string()));
    for kind in kinds {
        for is_guarded in [false, true] {
            through(kind, is_guarded)?;
        }
    }
    Ok(())
}

#[cfg(feature = "nixl")]
mod by_nixl {
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

    pub fn endpoint(setup: Setup) -> Result<Box<dyn Transport>, super::Failed> {
        let settings = SETTINGS.get().ok_or("it was prepared first")?;
        Ok(Box::new(Nixl::bind(setup, settings, SocketAddr::from(([127, 0, 0, 1], 0)), None)?))
    }

    pub fn leave(code: i32) -> ! {
        leave_with_nixl(code)
    }
}

#[cfg(not(feature = "nixl"))]
mod by_nixl {
    use penstock_transport::{Setup, Transport};

    pub fn prepare() {}

    pub fn endpoint(_: Setup) -> Result<Box<dyn Transport>, super::Failed> {
        Err("built without NIXL: build with the feature `nixl`".into())
    }

    pub fn leave(code: i32) -> ! {
        std::process::exit(code)
    }
}

fn report(what: &str, bytes: usize, mut took: Vec<Duration>) {
    took.sort_unstable();
    let rate = |time: Duration| bytes as f64 / time.as_secs_f64() / 1e9;
    let middle = took[took.len() / 2];
    let micros = middle.as_secs_f64() * 1e6;
    println!("figure: {what:<32} {:>8}  {micros:>12.1} {:>9.2} {:>9.2}", bytes / 1024, rate(middle), rate(took[0]));
}

fn plain_copy() {
    let from = vec![7_u8; BLOCK_BYTES * BLOCKS as usize];
    let mut to = vec![1_u8; from.len()];
    for (blocks, rounds) in SIZES {
        let bytes = blocks as usize * BLOCK_BYTES;
        let once = || {
            let start = Instant::now();
            std::hint::black_box(&mut to)[..bytes].copy_from_slice(&std::hint::black_box(&from)[..bytes]);
            start.elapsed()
        };
        report("memcpy", bytes, std::iter::repeat_with(once).take(rounds).collect());
    }
}

/// One buffer through a loopback connection, answered by one byte: no frames, no checksums.
fn plain_tcp() -> Result<(), Failed> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let receiver = std::thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut into = vec![0; BLOCK_BYTES * BLOCKS as usize];
        for (blocks, rounds) in SIZES {
            for _ in 0..rounds {
                stream.read_exact(&mut into[..blocks as usize * BLOCK_BYTES])?;
                stream.write_all(&[1])?;
            }
        }
        Ok(())
    });
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let from = vec![7_u8; BLOCK_BYTES * BLOCKS as usize];
    for (blocks, rounds) in SIZES {
        let bytes = blocks as usize * BLOCK_BYTES;
        let mut took = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            let start = Instant::now();
            stream.write_all(&from[..bytes])?;
            stream.read_exact(&mut [0])?;
            took.push(start.elapsed());
        }
        report("tcp stream, plain", bytes, took);
    }
    receiver.join().map_err(|_| "the receiver panicked")??;
    Ok(())
}

fn endpoint(kind: Kind, number: u64, address: &str, is_guarded: bool) -> Result<Box<dyn Transport>, Failed> {
    let region = Region::shared(BLOCK_BYTES, BLOCKS)?;
    for block in 0..BLOCKS {
        region.fill(block, &[number as u8; BLOCK_BYTES])?;
    }
    let identity = PeerId { endpoint: number, epoch: 1 };
    let setup = Setup { identity, regions: vec![region], is_guarded, limits: Limits::default() };
    let mut end: Box<dyn Transport> = match kind {
        Kind::Memfd => Box::new(Memfd::bind(setup, Path::new(address))?),
        Kind::Nixl => by_nixl::endpoint(setup)?,
        Kind::Tcp => Box::new(Tcp::bind(setup, SocketAddr::from(([127, 0, 0, 1], 0)), None)?),
        _ => Box::new(ByReference::new(setup)?),
    };
    if is_guarded {
        let all = 0..BLOCKS;
        end.grant(PeerId { endpoint: 1, epoch: 1 }, GRANT, 0, std::slice::from_ref(&all))?;
    }
    Ok(end)
}

/// The other end, in its own process until its input is closed.
fn serve(kind: &str, address: &str, is_guarded: bool) -> Result<(), Failed> {
    let kind = match kind {
        "memfd" => Kind::Memfd,
        "nixl" => Kind::Nixl,
        _ => Kind::Tcp,
    };
    let mut transport = endpoint(kind, 2, address, is_guarded)?;
    let bytes = transport.descriptor().encode();
    println!("{}", bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    let is_over = Arc::new(AtomicBool::new(false));
    let over = Arc::clone(&is_over);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        over.store(true, Ordering::Release);
    });
    keep_polling(transport.as_mut(), &is_over);
    Ok(())
}

fn keep_polling(transport: &mut dyn Transport, is_over: &AtomicBool) {
    let mut events = Vec::new();
    while !is_over.load(Ordering::Acquire) {
        transport.poll(Duration::from_millis(20), &mut events);
        events.clear();
    }
}

fn spawn(kind: Kind, is_guarded: bool) -> Result<(Child, Vec<u8>), Failed> {
    let address = std::env::temp_dir().join(format!("penstock-bench-{}.sock", std::process::id()));
    let mut command = Command::new(std::env::current_exe()?);
    let guard = if is_guarded { "guarded" } else { "open" };
    command.arg("serve").arg(kind.to_string()).arg(address).arg(guard);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("its output is piped")?).read_line(&mut line)?;
    let digits = line.trim();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16);
    Ok((child, (0..digits.len()).step_by(2).map(byte).collect::<Result<_, _>>()?))
}

fn through(kind: Kind, is_guarded: bool) -> Result<(), Failed> {
    let own = std::env::temp_dir().join(format!("penstock-bench-{}-own.sock", std::process::id()));
    let mut here = endpoint(kind, 1, &own.display().to_string(), false)?;
    if kind == Kind::Reference {
        let mut there = endpoint(kind, 2, "", is_guarded)?;
        let descriptor = there.descriptor().encode();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let other = std::thread::spawn(move || keep_polling(there.as_mut(), &over));
        let result = measure(kind, is_guarded, here.as_mut(), &descriptor);
        is_over.store(true, Ordering::Release);
        other.join().map_err(|_| "the other end panicked")?;
        return result;
    }
    let (mut child, descriptor) = spawn(kind, is_guarded)?;
    let result = measure(kind, is_guarded, here.as_mut(), &descriptor);
    drop(child.stdin.take());
    child.wait()?;
    result
}

fn measure(kind: Kind, is_guarded: bool, here: &mut dyn Transport, descriptor: &[u8]) -> Result<(), Failed> {
    let peer = here.connect(descriptor)?;
    let mut events = Vec::new();
    while !events.contains(&Event::Connected { peer }) {
        here.poll(Duration::from_millis(20), &mut events);
    }
    let mut op = 0;
    for is_scattered in [false, true] {
        // Nobody reads a guarded memory.
        let directions = if is_guarded { &[Direction::Write][..] } else { &[Direction::Write, Direction::Read] };
        for direction in directions.iter().copied() {
            for (blocks, rounds) in SIZES {
                if is_scattered && blocks < 16 {
                    continue;
                }
                let mut took = Vec::with_capacity(rounds);
                for _ in 0..rounds {
                    op += 1;
                    let spans = spans(blocks, is_scattered);
                    let deadline = Instant::now() + Duration::from_secs(60);
                    let start = Instant::now();
                    let transfer = Transfer { op: OpId(op), peer, direction, local: 0, remote: 0, spans, deadline };
                    here.start_under(GRANT, transfer)?;
                    wait(here, OpId(op), &mut events)?;
                    took.push(start.elapsed());
                }
                let way = match direction {
                    Direction::Write if is_guarded => "granted write",
                    Direction::Write => "write",
                    Direction::Read => "read",
                };
                let shape = if is_scattered { ", scattered" } else { "" };
                report(&format!("{kind} {way}{shape}"), blocks as usize * BLOCK_BYTES, took);
            }
        }
    }
    Ok(())
}

/// One run, or single blocks that are neighbours on neither side.
fn spans(blocks: u32, is_scattered: bool) -> Vec<Span> {
    if !is_scattered {
        return vec![Span { local: 0, remote: 0, blocks }];
    }
    // Odd factors: each number below 1,024 comes up once.
    (0..blocks).map(|i| Span { local: i * 37 % BLOCKS, remote: i * 101 % BLOCKS, blocks: 1 }).collect()
}

fn wait(here: &mut dyn Transport, op: OpId, events: &mut Vec<Event>) -> Result<(), Failed> {
    loop {
        events.clear();
        here.poll(Duration::from_millis(20), events);
        for event in events.iter() {
            if let Event::Ended { op: which, outcome, .. } = event
                && *which == op
            {
                return outcome.clone().map_err(|failure| failure.to_string().into());
            }
        }
    }
}
