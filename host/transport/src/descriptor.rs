//! What must a peer know in order to reach an endpoint?

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::wire::{Reader, put_bytes};
use crate::{Kind, PeerId, REGIONS_MAX, Region, Setup, TransportError, VERSION, sys};

const MAGIC: [u8; 4] = *b"PSTD";
/// Longest address: the path of a Unix socket is at most 108 bytes.
const FIELD_BYTES_MAX: usize = 4_096;

/// Sizes of a peer's region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Bytes of one block.
    pub block_bytes: u64,
    /// Number of blocks.
    pub blocks: u32,
}

impl Layout {
    pub(crate) fn of(region: &Region) -> Self {
        Self { block_bytes: region.block_bytes() as u64, blocks: region.blocks() }
    }
}

/// Where an endpoint runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The running kernel: its boot id. Containers of one host share it.
    pub host: [u8; 16],
    /// The process: drawn at random when it first asks.
    pub process: [u8; 16],
    /// The user that owns it.
    pub user: u32,
}

impl Place {
    /// Where this process runs. Without a boot id the host counts as one of its own.
    ///
    /// # Errors
    ///
    /// [`TransportError::Io`] when the system gives no random bytes.
    pub fn here() -> Result<Self, TransportError> {
        static HERE: OnceLock<Place> = OnceLock::new();
        if let Some(place) = HERE.get() {
            return Ok(*place);
        }
        let process = sys::unguessable()?;
        let host = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().and_then(|text| uuid(&text));
        let place = Self { host: host.unwrap_or(process), process, user: sys::own_user() };
        Ok(*HERE.get_or_init(|| place))
    }
}

/// The 16 bytes of a UUID in text.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32).map(u128::to_be_bytes)
}

/// How an endpoint of each kind is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Address {
    /// By its number in the process.
    Reference(u64),
    /// At a Unix socket.
    Memfd(PathBuf),
    /// At an IP address that the peer can reach.
    Tcp(SocketAddr),
    /// By NIXL.
    Nixl(NixlAddress),
}

/// How an endpoint is reached whose bytes NIXL moves. Its metadata, some hundred bytes, come with the answer to the greeting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NixlAddress {
    /// Where it is greeted: permission, doorbell and cancellation go over TCP.
    pub control: SocketAddr,
    /// What its metadata are written in, from NIXL's version: `major << 8 | minor`. Only equals understand each other.
    pub wire: u16,
    /// There is RDMA where it runs. Without, NIXL falls back on TCP of its own.
    pub has_rdma: bool,
}

impl Address {
    /// The kind that uses it.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Reference(_) => Kind::Reference,
            Self::Memfd(_) => Kind::Memfd,
            Self::Tcp(_) => Kind::Tcp,
            Self::Nixl(_) => Kind::Nixl,
        }
    }
}

/// All that a peer needs to connect. Who holds it may read and write the endpoint's regions, so it travels on a trusted way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// Whom it describes.
    pub identity: PeerId,
    /// Where that runs.
    pub place: Place,
    /// Shown when connecting; drawn at random for each life of the endpoint.
    pub token: [u8; 16],
    /// Nobody reads its memory, and nobody writes to it but under a grant.
    pub is_guarded: bool,
    /// How it is reached.
    pub address: Address,
    /// Its regions, in order.
    pub regions: Vec<Layout>,
}

impl Descriptor {
    pub(crate) fn new(setup: &Setup, address: Address) -> Result<Self, TransportError> {
        let Setup { identity, regions, is_guarded, .. } = setup;
        if regions.is_empty() {
            return Err(TransportError::Empty);
        }
        if regions.len() > REGIONS_MAX {
            let (value, limit) = (regions.len() as u64, REGIONS_MAX as u64);
            return Err(TransportError::TooLarge { what: "regions", value, limit });
        }
        let regions = regions.iter().map(Layout::of).collect();
        let (identity, is_guarded) = (*identity, *is_guarded);
        Ok(Self { identity, place: Place::here()?, token: sys::unguessable()?, is_guarded, address, regions })
    }

    /// The bytes that [`Transport::connect`](crate::Transport::connect) takes.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.identity.endpoint.to_le_bytes());
        bytes.extend_from_slice(&self.identity.epoch.to_le_bytes());
        bytes.extend_from_slice(&self.place.host);
        bytes.extend_from_slice(&self.place.process);
        bytes.extend_from_slice(&self.place.user.to_le_bytes());
        bytes.extend_from_slice(&self.token);
        bytes.push(u8::from(self.is_guarded));
        match &self.address {
            Address::Reference(number) => {
                bytes.push(0);
                bytes.extend_from_slice(&number.to_le_bytes());
            }
            Address::Memfd(path) => {
                bytes.push(1);
                put_bytes(&mut bytes, path.as_os_str().as_encoded_bytes());
            }
            Address::Tcp(address) => {
                bytes.push(2);
                put_bytes(&mut bytes, address.to_string().as_bytes());
            }
            Address::Nixl(NixlAddress { control, wire, has_rdma }) => {
                bytes.push(3);
                put_bytes(&mut bytes, control.to_string().as_bytes());
                bytes.extend_from_slice(&wire.to_le_bytes());
                bytes.push(u8::from(*has_rdma));
            }
        }
        put_regions(&mut bytes, &self.regions);
        let sum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    ///
    /// [`TransportError::Version`] for another version, [`TransportError::Descriptor`] for anything else that is not one.
    pub fn decode(bytes: &[u8]) -> Result<Self, TransportError> {
        let mut reader = Reader::new(bytes);
        if reader.array()? != MAGIC {
            return Err(TransportError::Descriptor("it does not begin like one"));
        }
        let theirs = reader.u16()?;
        if theirs != VERSION {
            return Err(TransportError::Version { ours: VERSION, theirs });
        }
        let (body, sum) = bytes.split_last_chunk().ok_or(TransportError::Descriptor("it ends too early"))?;
        if crc32c::crc32c(body) != u32::from_le_bytes(*sum) {
            return Err(TransportError::Descriptor("its checksum is wrong"));
        }
        let mut reader = Reader::new(&body[MAGIC.len() + size_of::<u16>()..]);
        let identity = PeerId { endpoint: reader.u64()?, epoch: reader.u64()? };
        let place = Place { host: reader.array()?, process: reader.array()?, user: reader.u32()? };
        let token = reader.array()?;
        let flag = |byte: u8| match byte {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(TransportError::Descriptor("a yes or no is neither")),
        };
        let is_guarded = flag(reader.u8()?)?;
        let text = |bytes: &[u8]| {
            String::from_utf8(bytes.to_vec()).map_err(|_| TransportError::Descriptor("an address is not text"))
        };
        let socket = |written: String| -> Result<SocketAddr, TransportError> {
            written.parse().map_err(|_| TransportError::Descriptor("its IP address is not one"))
        };
        let address = match reader.u8()? {
            0 => Address::Reference(reader.u64()?),
            1 => Address::Memfd(PathBuf::from(text(reader.bytes(FIELD_BYTES_MAX)?)?)),
            2 => Address::Tcp(socket(text(reader.bytes(FIELD_BYTES_MAX)?)?)?),
            3 => Address::Nixl(NixlAddress {
                control: socket(text(reader.bytes(FIELD_BYTES_MAX)?)?)?,
                wire: reader.u16()?,
                has_rdma: flag(reader.u8()?)?,
            }),
            _ => return Err(TransportError::Descriptor("its kind is unknown")),
        };
        let regions = get_regions(&mut reader)?;
        reader.end()?;
        Ok(Self { identity, place, token, is_guarded, address, regions })
    }
}

pub(crate) fn put_regions(bytes: &mut Vec<u8>, regions: &[Layout]) {
    bytes.push(regions.len() as u8);
    for region in regions {
        bytes.extend_from_slice(&region.block_bytes.to_le_bytes());
        bytes.extend_from_slice(&region.blocks.to_le_bytes());
    }
}

pub(crate) fn get_regions(reader: &mut Reader<'_>) -> Result<Vec<Layout>, TransportError> {
    let count = usize::from(reader.u8()?);
    if count == 0 || count > REGIONS_MAX {
        return Err(TransportError::Descriptor("it has no region, or too many"));
    }
    let regions: Vec<Layout> = (0..count)
        .map(|_| Ok(Layout { block_bytes: reader.u64()?, blocks: reader.u32()? }))
        .collect::<Result<_, TransportError>>()?;
    let is_sane = |region: &Layout| {
        let bytes = region.block_bytes.checked_mul(u64::from(region.blocks));
        region.blocks > 0 && bytes.is_some_and(|bytes| (1..=isize::MAX as u64).contains(&bytes))
    };
    if regions.iter().all(is_sane) { Ok(regions) } else { Err(TransportError::Descriptor("a region has no size")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Limits;

    fn all() -> Vec<Descriptor> {
        let addresses = [
            Address::Reference(7),
            Address::Memfd(PathBuf::from("/run/penstock/kv.sock")),
            Address::Tcp(SocketAddr::from(([10, 0, 0, 7], 4321))),
            Address::Nixl(NixlAddress {
                control: SocketAddr::from(([10, 0, 0, 7], 4321)),
                wire: 0x0105,
                has_rdma: true,
            }),
        ];
        let regions = [Region::private(64, 3).unwrap(), Region::private(128, 2).unwrap()];
        let setup = |is_guarded| Setup {
            identity: PeerId { endpoint: 3, epoch: 9 },
            regions: regions.to_vec(),
            is_guarded,
            limits: Limits::default(),
        };
        let both =
            |address: Address| [false, true].map(|guarded| Descriptor::new(&setup(guarded), address.clone()).unwrap());
        addresses.into_iter().flat_map(both).collect()
    }

    #[test]
    fn what_was_written_is_read() {
        for descriptor in all() {
            assert_eq!(Descriptor::decode(&descriptor.encode()).unwrap(), descriptor);
        }
    }

    #[test]
    fn no_damage_goes_unnoticed() {
        for descriptor in all() {
            let bytes = descriptor.encode();
            for at in 0..bytes.len() {
                assert!(Descriptor::decode(&bytes[..at]).is_err(), "cut at {at}");
                let mut damaged = bytes.clone();
                damaged[at] ^= 0x20;
                assert!(Descriptor::decode(&damaged).is_err(), "bit flipped in byte {at}");
            }
            let mut longer = bytes.clone();
            longer.push(0);
            assert!(Descriptor::decode(&longer).is_err());
        }
    }

    #[test]
    fn another_version_says_which() {
        let mut bytes = all()[0].encode();
        bytes[4..6].copy_from_slice(&77_u16.to_le_bytes());
        assert!(matches!(Descriptor::decode(&bytes), Err(TransportError::Version { ours: VERSION, theirs: 77 })));
    }

    #[test]
    fn a_boot_id_is_read_as_it_is_written() {
        let text = "00112233-4455-6677-8899-aabbccddeeff\n";
        let bytes = [0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff];
        assert_eq!(uuid(text), Some(bytes));
        assert_eq!(uuid("0011"), None);
    }
}
