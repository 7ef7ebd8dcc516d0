//! What the machines did is on disk: it comes out again, holds nothing that a client wrote, and a disk or a queue that does not take it
//! costs the journal alone.

mod support;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use penstock_base::{Generation, Instant};
use penstock_engine::{Engine, EngineConfig, JournalConfig, KeptFor, Machine, NATIVE_WORDS, PolicySource};
use penstock_exec::SamplingParams;
use penstock_journal::{BreakCause, Ending, Examined, JournalError, MachineId, Remade, Remake, VerifyError, examine};
use penstock_policy_api::native::NativePolicies;
use penstock_policy_api::{Decision, Policies, Question};
use support::{Nonsense, OptimisticPolicies, Rig, Sizes, answer, prompt, read};

/// A folder of the test's own.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("penstock-journal-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn journal(dir: &Path) -> JournalConfig {
    JournalConfig {
        dir: dir.to_owned(),
        segment_bytes: 32 << 20,
        total_bytes: 1 << 30,
        queue_bytes: 16 << 20,
        build: "test".into(),
    }
}

fn config(journal: JournalConfig) -> EngineConfig {
    EngineConfig { journal: Some(journal), ..EngineConfig::default() }
}

fn segments(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).expect("the folder is there");
    let mut all: Vec<_> = entries.map(|entry| entry.expect("an entry").path()).collect();
    all.sort();
    all
}

/// Makes the native defaults again.
struct Natives(NativePolicies);

struct Remaker;

impl Remake for Remaker {
    fn remake(&mut self, _: MachineId, context_tokens_max: u32, set: &[u8]) -> Result<Box<dyn Remade>, String> {
        if set != NATIVE_WORDS {
            return Err("another set".into());
        }
        Ok(Box::new(Natives(NativePolicies::new(Generation(0), context_tokens_max))))
    }
}

impl Remade for Natives {
    fn policies(&mut self) -> &mut dyn Policies {
        &mut self.0
    }
    fn last_fuel(&self, _: Decision) -> u64 {
        0
    }
}

fn examined(bytes: &[u8]) -> Result<Examined, JournalError> {
    examine(bytes, Some(&mut Remaker))
}

/// The segment holds, and its policies say the same again.
fn holds(path: &Path) -> Examined {
    let bytes = std::fs::read(path).expect("a segment");
    let examined = examined(&bytes).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()));
    assert!(examined.fault.is_none(), "{}: {:?}", path.display(), examined.fault);
    assert_eq!(examined.asked.first, None, "{}", path.display());
    examined
}

/// Sixteen requests, four of them with equal beginnings, in a pool where some must give way.
fn traffic(rig: &Rig) {
    let streams: Vec<_> = (0..16)
        .map(|which| {
            let prompt = prompt(which % 12, 20 + which);
            let stream = rig.submit(rig.submission(&prompt, 24));
            (prompt, stream)
        })
        .collect();
    for (prompt, mut stream) in streams {
        let got = read(&mut stream);
        assert_eq!(got.tokens[0], answer(&prompt, &SamplingParams::default(), 24));
    }
    rig.wait_until_empty();
}

#[test]
fn every_machines_journal_comes_out_again() {
    let dir = folder("whole");
    let config =
        EngineConfig { policies: PolicySource::new(|_| Box::new(OptimisticPolicies::new())), ..config(journal(&dir)) };
    let rig = Rig::new(2, Sizes { blocks: 24, ..Sizes::default() }, config);
    traffic(&rig);
    // Another set takes over, one that fails, and the native one again.
    let activate = |source: &PolicySource| rig.engine.activate(source).expect("a set that can serve");
    activate(&PolicySource::native());
    traffic(&rig);
    activate(&PolicySource::new(|_| Box::new(Nonsense::new())));
    traffic(&rig);
    activate(&PolicySource::native());
    traffic(&rig);
    assert!(rig.engine.shutdown());
    let files = segments(&dir);
    assert_eq!(files.len(), 3, "one a machine: {files:?}");
    let (mut same, mut not_at_hand, mut steps) = (0, 0, 0);
    for path in &files {
        let mode = std::fs::metadata(path).expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "its owner's alone");
        let examined = holds(path);
        assert_eq!(examined.verified.ending, Ending::Complete);
        assert!(!examined.verified.unfinished);
        assert!(examined.verified.steps > 0);
        same += examined.asked.same;
        not_at_hand += examined.asked.not_at_hand;
        steps += examined.verified.steps;
    }
    assert!(same > 30 && not_at_hand > 30, "{same} asked again, {not_at_hand} not: both kinds of sets were asked");
    let bytes: u64 = files.iter().map(|path| std::fs::metadata(path).expect("a file").len()).sum();
    println!("figure: {} journal bytes a request of about 30 tokens in and 24 out, {steps} steps", bytes / 64);
    std::fs::remove_dir_all(dir).expect("the test's own folder");
}

#[test]
fn nothing_that_a_client_wrote_is_in_it() {
    let dir = folder("words");
    let rig = Rig::new(1, Sizes::default(), config(journal(&dir)));
    // Token ids that no count, time or size comes near in this order.
    let prompt: Vec<u32> = (0..40).map(|i| (i * 29 + 11) % 63).collect();
    let answer = read(&mut rig.submit(rig.submission(&prompt, 40)));
    assert!(rig.engine.shutdown());
    let written: Vec<u8> = segments(&dir).iter().flat_map(|path| std::fs::read(path).expect("a segment")).collect();
    assert!(written.len() > 4_000, "{} bytes", written.len());
    let has = |needle: &[u8]| written.windows(needle.len()).any(|window| window == needle);
    assert!(has(b"overlap-load"), "the search finds what is there");
    for tokens in [&prompt, &answer.tokens[0]] {
        // Three in a row, in every width that a number is written in.
        for three in tokens.windows(3) {
            let as_words: Vec<u8> = three.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect();
            let as_longs: Vec<u8> = three.iter().flat_map(|id| id.to_le_bytes()).collect();
            assert!(!has(&as_words) && !has(&as_longs), "{three:?}");
        }
        // Three small bytes may stand together by chance; eight cannot.
        let all: Vec<u8> = tokens.iter().take(8).map(|id| *id as u8).collect();
        assert!(!has(&all));
    }
    let text = &answer.texts[0].as_bytes()[..6];
    assert!(!has(text), "{:?}", answer.texts[0]);
    assert!(!has(support::text_of(&prompt).as_bytes().get(..6).expect("long enough")));
    std::fs::remove_dir_all(dir).expect("the test's own folder");
}

#[test]
fn a_segment_that_is_full_is_followed_by_another_and_the_oldest_leave() {
    let dir = folder("sizes");
    let rig = Rig::new(
        1,
        Sizes::default(),
        config(JournalConfig { segment_bytes: 20_000, total_bytes: 400_000, ..journal(&dir) }),
    );
    (0..10).for_each(|_| traffic(&rig));
    assert!(rig.engine.shutdown());
    let files = segments(&dir);
    let bytes: u64 = files.iter().map(|path| std::fs::metadata(path).expect("a file").len()).sum();
    assert!(bytes <= 400_000, "{bytes} bytes");
    let named = |part: &str| files.iter().filter(|path| path.to_string_lossy().contains(part)).count();
    assert!(named("-gateway-") >= 2 && named("-gateway-000000") == 0, "{files:?}");
    for path in &files {
        assert_eq!(holds(path).verified.ending, Ending::Complete, "{}", path.display());
    }
    assert!(rig.metric("penstock_journal_segments_total") > files.len() as f64);
    assert!(rig.metric("penstock_journal_bytes_total") > 400_000.0);
    std::fs::remove_dir_all(dir).expect("the test's own folder");
}

#[test]
fn a_disk_that_takes_nothing_costs_the_journal_alone() {
    let file = folder("no-folder");
    std::fs::write(&file, b"in the way").expect("a file");
    let rig = Rig::new(1, Sizes::default(), config(journal(&file)));
    traffic(&rig);
    assert!(rig.engine.shutdown());
    assert!(rig.metric("penstock_journal_errors_total") >= 1.0);
    assert_eq!(rig.metric("penstock_journal_bytes_total"), 0.0);
    std::fs::remove_file(file).expect("the test's own file");
}

#[test]
fn a_queue_without_room_breaks_segments_off_and_never_leaves_a_record_out() {
    let dir = folder("overload");
    // Smaller than what a machine hands over at once: every segment that opens overflows.
    let rig = Rig::new(1, Sizes::default(), config(JournalConfig { queue_bytes: 16_000, ..journal(&dir) }));
    (0..4).for_each(|_| traffic(&rig));
    assert!(rig.engine.shutdown());
    let mut broken = 0;
    for path in segments(&dir) {
        let examined = holds(&path);
        broken += u64::from(examined.verified.ending == Ending::Broken(BreakCause::Overload));
    }
    assert!(broken > 0);
    std::fs::remove_dir_all(dir).expect("the test's own folder");
}

/// A small segment of a gateway.
fn small(name: &str) -> Vec<u8> {
    let dir = folder(name);
    let rig = Rig::new(1, Sizes::default(), config(journal(&dir)));
    read(&mut rig.submit(rig.submission(&prompt(1, 10), 2)));
    assert!(rig.engine.shutdown());
    let files = segments(&dir);
    let gateway = files.iter().find(|path| path.to_string_lossy().contains("-gateway-")).expect("the gateway's");
    let bytes = std::fs::read(gateway).expect("a segment");
    std::fs::remove_dir_all(dir).expect("the test's own folder");
    bytes
}

#[test]
fn a_segment_cut_anywhere_holds_as_far_as_it_goes() {
    let whole = small("cut");
    let all = examined(&whole).expect("a segment").verified;
    let mut last = 0;
    // Every byte of the end, and every so many of the opening, which is the longer part.
    let opening = (0..whole.len().saturating_sub(4_000)).step_by(97);
    for cut in opening.chain(whole.len().saturating_sub(4_000)..whole.len()) {
        match examined(&whole[..cut]) {
            Err(JournalError::Truncated { record: 0 }) => assert_eq!(last, 0),
            Ok(examined) => {
                let verified = examined.verified;
                assert!(verified.records >= last && verified.records < all.records, "cut at {cut}");
                last = verified.records;
                match examined.fault {
                    None => assert_eq!(verified.ending, Ending::CutOff, "cut at {cut}"),
                    Some(VerifyError::Journal(JournalError::Truncated { record })) => assert_eq!(record, last + 1),
                    Some(fault) => panic!("cut at {cut}: {fault}"),
                }
            }
            Err(fault) => panic!("cut at {cut}: {fault}"),
        }
    }
    assert_eq!(last + 1, all.records, "all but the end was seen");
}

#[test]
fn a_changed_bit_is_named() {
    let mut segment = small("flip");
    let bits = segment.len() * 8;
    // A stride that is no multiple of anything in the format.
    for at in (0..bits).step_by(1_009) {
        segment[at / 8] ^= 1 << (at % 8);
        let found = examined(&segment);
        assert!(found.is_err() || found.is_ok_and(|examined| examined.fault.is_some()), "bit {at}");
        segment[at / 8] ^= 1 << (at % 8);
    }
    assert!(examined(&segment).expect("as before").fault.is_none());
}

#[test]
fn what_policies_were_told_is_kept_for_those_that_are_worth_it() {
    let config = EngineConfig {
        policies: PolicySource::new(|_| Box::new(Nonsense::new())),
        decisions: penstock_engine::DecisionsConfig { sample_ppm: 0, ..Default::default() },
        ..EngineConfig::default()
    };
    let rig = Rig::new(1, Sizes::default(), config);
    let (ticket, mut stream) = rig.engine.submit(rig.submission(&prompt(1, 10), 4)).expect("room");
    read(&mut stream);
    drop(stream);
    rig.wait_until_empty();
    let find = |engine: &Engine| {
        let found = engine.decisions(64, |record| record.request == Some(ticket.request));
        found.into_iter().flat_map(|(_, records)| records).find(|record| record.question == Question::Routing)
    };
    let deadline = std::time::Instant::now() + support::PATIENCE;
    let record = loop {
        if let Some(record) = find(&rig.engine) {
            break record;
        }
        assert!(std::time::Instant::now() < deadline, "the decision comes into the ring with the next turn");
        std::thread::sleep(std::time::Duration::from_millis(2));
    };
    assert_eq!(record.kept, Some(KeptFor::Fault), "{record:?}");
    let inputs = rig.engine.inputs(Machine::Gateway, record.sequence).expect("kept");
    assert_eq!((inputs.call, inputs.kept_for), (record.call, KeptFor::Fault));
    assert_eq!(inputs.request.map(|request| request.input_tokens), Some(10));
    let moments = rig.engine.moments(ticket.request);
    assert!(moments.len() >= 5, "{moments:?}");
    assert!(moments.windows(2).all(|two| two[0].at <= two[1].at) && moments[0].at > Instant::ZERO);
    // What was neither refused nor changed is not in a sample of nothing.
    let plain = rig.engine.decisions(1_000, |record| record.fallback.is_none() && record.changed.is_none());
    assert!(plain.iter().flat_map(|(_, records)| records).all(|record| record.kept.is_none()));
}
