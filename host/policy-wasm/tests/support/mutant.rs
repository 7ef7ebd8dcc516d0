//! Mutants of components: changed section by section, so that most of them get further than the first byte that is wrong.
#![allow(dead_code, reason = "each test file uses its part")]

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A module or component, or a part of either: what follows its eight bytes of head.
#[derive(Clone, Debug)]
pub struct Tree {
    head: [u8; 8],
    sections: Vec<Section>,
}

#[derive(Clone, Debug)]
struct Section {
    id: u8,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    Bytes(Vec<u8>),
    Nested(Tree),
}

/// Sections of a component that hold a whole module or component.
const NESTED: [u8; 2] = [1, 4];
/// The sections of a module's code and of its data.
const CODE: u8 = 10;
const DATA: u8 = 11;
/// Opcodes that take and give the same types, so that one in another's place is as valid: comparisons and arithmetic of both widths, loads and
/// stores of 32 bits and of 64.
const ALIKE: [&[u8]; 6] = [
    &[0x46, 0x47, 0x48, 0x49, 0x4a, 0x4b, 0x4c, 0x4d, 0x4e, 0x4f, 0x6a, 0x6b, 0x6c, 0x6d, 0x6e, 0x6f, 0x70, 0x71, 0x72],
    &[0x51, 0x52, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5a],
    &[0x7c, 0x7d, 0x7e, 0x7f, 0x80, 0x81, 0x82, 0x83, 0x84, 0x85, 0x86, 0x87, 0x88],
    &[0x2c, 0x2d],
    &[0x30, 0x31],
    &[0x0c, 0x0d],
];
/// Where most of what a component is made of is said by number: types, instances, aliases, lifts, imports, exports, functions.
const LARGE: [u64; 9] = [0, 1, 2, 127, 128, 16_383, 65_536, 0x7fff_ffff, 0xffff_ffff];
/// Opcodes that a guest does harm with: unreachable, nop, loop, br, br_if, br_table, return, call, call_indirect, drop, loads, stores, grow, size,
/// the prefix of bulk operations.
const OPCODES: [u8; 18] =
    [0x00, 0x01, 0x03, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x1a, 0x28, 0x29, 0x36, 0x37, 0x3f, 0x40, 0xfc];

fn read_leb(bytes: &[u8], at: &mut usize) -> Option<u64> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let byte = *bytes.get(*at)?;
        *at += 1;
        value |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn write_leb(mut value: u64, out: &mut Vec<u8>) {
    loop {
        let byte = (value & 0x7f) as u8;
        value >>= 7;
        if value == 0 {
            return out.push(byte);
        }
        out.push(byte | 0x80);
    }
}

impl Tree {
    /// Reads a component that is well-formed as far as its sections go.
    pub fn read(bytes: &[u8]) -> Option<Self> {
        let head: [u8; 8] = bytes.get(..8)?.try_into().ok()?;
        let is_component = head[6] == 1;
        let mut sections = Vec::new();
        let mut at = 8;
        while at < bytes.len() {
            let id = bytes[at];
            at += 1;
            let size = read_leb(bytes, &mut at)? as usize;
            let payload = bytes.get(at..at.checked_add(size)?)?;
            at += size;
            let nested = if is_component && NESTED.contains(&id) { Self::read(payload) } else { None };
            let body = nested.map_or_else(|| Body::Bytes(payload.to_vec()), Body::Nested);
            sections.push(Section { id, body });
        }
        Some(Self { head, sections })
    }

    pub fn write(&self) -> Vec<u8> {
        let mut out = self.head.to_vec();
        for section in &self.sections {
            let payload = match &section.body {
                Body::Bytes(bytes) => bytes.clone(),
                Body::Nested(tree) => tree.write(),
            };
            out.push(section.id);
            write_leb(payload.len() as u64, &mut out);
            out.extend(payload);
        }
        out
    }

    /// A list of sections somewhere in it: often deep, where the code is.
    fn somewhere(&mut self, random: &mut Random) -> &mut Self {
        let nested: Vec<usize> =
            (0..self.sections.len()).filter(|at| matches!(self.sections[*at].body, Body::Nested(_))).collect();
        if nested.is_empty() || random.one_in(3) {
            return self;
        }
        let at = nested[random.below(nested.len())];
        match &mut self.sections[at].body {
            Body::Nested(tree) => tree.somewhere(random),
            Body::Bytes(_) => unreachable!("only nested ones were listed"),
        }
    }

    /// One change.
    fn change(&mut self, donor: &mut Self, random: &mut Random) {
        let tree = self.somewhere(random);
        if tree.sections.is_empty() {
            return;
        }
        let at = random.below(tree.sections.len());
        match random.below(12) {
            0 => drop(tree.sections.remove(at)),
            1 => {
                let twice = tree.sections[at].clone();
                tree.sections.insert(random.below(tree.sections.len() + 1), twice);
            }
            2 => {
                let other = random.below(tree.sections.len());
                tree.sections.swap(at, other);
            }
            3 => {
                // A section of the same kind, from somewhere else.
                let from = donor.somewhere(random);
                let id = tree.sections[at].id;
                let found: Vec<_> = from.sections.iter().filter(|section| section.id == id).collect();
                if !found.is_empty() {
                    tree.sections[at] = found[random.below(found.len())].clone();
                }
            }
            4 => tree.sections[at].id = random.below(16) as u8,
            5 => tree.head[random.below(8)] ^= 1 << random.below(8),
            _ => match &mut tree.sections[at] {
                Section { body: Body::Nested(nested), .. } => nested.change(donor, random),
                Section { id, body: Body::Bytes(bytes) } => change_bytes(*id, bytes, random),
            },
        }
    }

    /// Code and data of the modules in it.
    fn flesh<'a>(&'a mut self, found: &mut Vec<&'a mut Section>) {
        let is_module = self.head[6] == 0;
        for section in &mut self.sections {
            match &section.body {
                Body::Bytes(bytes) if is_module && [CODE, DATA].contains(&section.id) && bytes.len() > 8 => {
                    found.push(section);
                }
                Body::Bytes(_) => {}
                Body::Nested(_) => {
                    if let Body::Nested(tree) = &mut section.body {
                        tree.flesh(found);
                    }
                }
            }
        }
    }

    /// A mutant that most likely is well-formed: other numbers in the code, other operations of the same types, other data.
    fn gentle(&self, random: &mut Random) -> Vec<u8> {
        let mut tree = self.clone();
        let mut flesh = Vec::new();
        tree.flesh(&mut flesh);
        for _ in 0..1 + random.below(6) {
            if flesh.is_empty() {
                break;
            }
            let at = random.below(flesh.len());
            let section = &mut *flesh[at];
            let Body::Bytes(bytes) = &mut section.body else { continue };
            // Past the counts and the first segment's place.
            let at = 8 + random.below(bytes.len() - 8);
            if section.id == DATA {
                bytes[at] = if random.one_in(2) { random.next() as u8 } else { bytes[at] ^ 1 << random.below(8) };
                continue;
            }
            // The next operation that has one like it, or the next constant.
            let alike = |byte: u8| ALIKE.iter().find(|alike| alike.contains(&byte));
            let Some(found) =
                (at..bytes.len() - 1).find(|at| alike(bytes[*at]).is_some() || [0x41, 0x42].contains(&bytes[*at]))
            else {
                continue;
            };
            match alike(bytes[found]) {
                Some(others) => bytes[found] = others[random.below(others.len())],
                // The low bits of a constant: its length stays.
                None => bytes[found + 1] = bytes[found + 1] & 0x80 | random.next() as u8 & 0x7f,
            }
        }
        tree.write()
    }

    /// A mutant: half of them well-formed in all likelihood, the others with one to three changes to their sections, now and then to the bytes as
    /// a whole.
    pub fn mutant(&self, donor: &Self, random: &mut Random) -> Vec<u8> {
        if random.one_in(2) {
            return self.gentle(random);
        }
        let (mut tree, mut donor) = (self.clone(), donor.clone());
        for _ in 0..1 + random.below(3) {
            tree.change(&mut donor, random);
        }
        let mut bytes = tree.write();
        match random.below(20) {
            0 => bytes.truncate(random.below(bytes.len())),
            1 => bytes.extend_from_slice(&donor.write()),
            _ => {}
        }
        bytes
    }
}

fn change_bytes(id: u8, bytes: &mut Vec<u8>, random: &mut Random) {
    if bytes.is_empty() {
        return bytes.push(random.next() as u8);
    }
    let at = random.below(bytes.len());
    match random.below(7) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.next() as u8,
        2 => bytes.truncate(at),
        3 => bytes.insert(at, random.next() as u8),
        // The count that a section begins with.
        4 => change_number(bytes, 0, random),
        5 => change_number(bytes, at, random),
        _ if id == CODE => bytes[at] = OPCODES[random.below(OPCODES.len())],
        // An index or a size among the first ones, where types and descriptions are.
        _ => {
            let near = random.below(bytes.len().min(24));
            change_number(bytes, near, random);
        }
    }
}

/// Another number in the place of the one that begins at `at`.
fn change_number(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let mut end = at;
    let Some(value) = read_leb(bytes, &mut end) else { return };
    let changed = match random.below(4) {
        0 => value.wrapping_add(1) & 0xffff_ffff,
        1 => value.saturating_sub(1),
        2 => random.next() >> (32 + random.below(32)),
        _ => LARGE[random.below(LARGE.len())],
    };
    let mut number = Vec::new();
    write_leb(changed, &mut number);
    bytes.splice(at..end, number);
}
