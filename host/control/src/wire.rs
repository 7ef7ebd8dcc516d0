//! What travels, message by message. The same as `control.proto`, which a test compares with this file.

use bytes::Bytes;

use crate::session::Frame;

/// Version of the conversation. Two ends of different versions do not talk.
pub const VERSION: u32 = 1;

/// One thing that one end says.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Packet {
    #[prost(oneof = "Word", tags = "1, 2, 3, 4, 5, 6")]
    pub word: Option<Word>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Word {
    #[prost(message, tag = "1")]
    Hello(Hello),
    #[prost(message, tag = "2")]
    Welcome(Welcome),
    #[prost(message, tag = "3")]
    Reject(Reject),
    #[prost(message, tag = "4")]
    Message(Message),
    #[prost(message, tag = "5")]
    Beat(Beat),
    #[prost(message, tag = "6")]
    Bye(Bye),
}

/// First word of the caller.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Hello {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    #[prost(fixed64, tag = "2")]
    pub from_id: u64,
    #[prost(fixed64, tag = "3")]
    pub from_epoch: u64,
    /// Life of the other end that is meant; 0 is any.
    #[prost(fixed64, tag = "4")]
    pub to_epoch: u64,
    /// Number of the session in the caller's life, 1, 2, 3 ..
    #[prost(uint64, tag = "5")]
    pub session: u64,
    /// Number of the connection in the session, 1, 2, 3 ..
    #[prost(uint64, tag = "6")]
    pub connection: u64,
    #[prost(uint64, tag = "7")]
    pub received: u64,
    /// What both ends must have in common, as the layer above writes it.
    #[prost(string, tag = "8")]
    pub compatibility: String,
    #[prost(bytes = "bytes", tag = "9")]
    pub greeting: Bytes,
    /// The caller has been welcome in this session before: who does not know it must not begin it.
    #[prost(bool, tag = "10")]
    pub resumes: bool,
}

/// First word of the other end.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Welcome {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    #[prost(fixed64, tag = "2")]
    pub id: u64,
    #[prost(fixed64, tag = "3")]
    pub epoch: u64,
    #[prost(uint64, tag = "4")]
    pub received: u64,
    #[prost(bytes = "bytes", tag = "5")]
    pub greeting: Bytes,
}

/// The other end will not.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Reject {
    #[prost(uint32, tag = "1")]
    pub reason: u32,
    #[prost(string, tag = "2")]
    pub detail: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Message {
    #[prost(uint64, tag = "1")]
    pub number: u64,
    #[prost(uint64, tag = "2")]
    pub received: u64,
    #[prost(bytes = "bytes", tag = "3")]
    pub body: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Beat {
    #[prost(uint64, tag = "1")]
    pub received: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Bye {}

impl Packet {
    pub fn of(word: Word) -> Self {
        Self { word: Some(word) }
    }

    /// What goes on the wire for a frame of the session.
    pub fn of_frame(frame: Frame) -> Self {
        Self::of(match frame {
            Frame::Message { number, received, body } => Word::Message(Message { number, received, body }),
            Frame::Beat { received } => Word::Beat(Beat { received }),
            Frame::Bye => Word::Bye(Bye {}),
        })
    }

    /// The frame, unless it belongs to the opening of a connection or means nothing.
    pub fn into_frame(self) -> Option<Frame> {
        match self.word? {
            Word::Message(Message { number, received, body }) => Some(Frame::Message { number, received, body }),
            Word::Beat(Beat { received }) => Some(Frame::Beat { received }),
            Word::Bye(Bye {}) => Some(Frame::Bye),
            Word::Hello(_) | Word::Welcome(_) | Word::Reject(_) => None,
        }
    }
}

/// Why a hello is not answered with a welcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// It speaks another version.
    Version,
    /// It has other weights, layouts or types: the detail says what each end has.
    Compatibility,
    /// It meant another life of this end.
    Epoch,
    /// A later life, or a later session, of the same caller is known.
    Outdated,
    /// The session is not known here any more.
    Forgotten,
    /// As many sessions as it takes.
    Full,
    /// It drains: no new session.
    Draining,
    /// A reason that this version does not know.
    Unknown,
}

/// Their numbers on the wire.
const REFUSALS: [(Refusal, u32); 7] = [
    (Refusal::Version, 1),
    (Refusal::Compatibility, 2),
    (Refusal::Epoch, 3),
    (Refusal::Outdated, 4),
    (Refusal::Forgotten, 5),
    (Refusal::Full, 6),
    (Refusal::Draining, 7),
];

impl Refusal {
    /// On the wire.
    pub(crate) fn number(self) -> u32 {
        REFUSALS.iter().find(|(refusal, _)| *refusal == self).map_or(0, |(_, number)| *number)
    }

    /// From the wire.
    pub(crate) fn of(number: u32) -> Self {
        REFUSALS.iter().find(|(_, of)| *of == number).map_or(Self::Unknown, |(refusal, _)| *refusal)
    }

    /// May another try succeed without anything being changed?
    pub(crate) fn is_passing(self) -> bool {
        matches!(self, Self::Full | Self::Draining)
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Version => "it speaks another version",
            Self::Compatibility => "the two ends cannot work together",
            Self::Epoch => "another life of it answers",
            Self::Outdated => "it knows a later life of this end",
            Self::Forgotten => "it does not know the session any more",
            Self::Full => "it takes no more sessions",
            Self::Draining => "it drains",
            Self::Unknown => "it gave a reason that is not known here",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, tags and types as this file declares them, in the words of a .proto file.
    fn declared() -> Vec<String> {
        let text = include_str!("wire.rs");
        let mut fields = Vec::new();
        let mut attribute = None;
        for line in text.lines().map(str::trim).take_while(|line| !line.starts_with("#[cfg(test)]")) {
            if let Some(inside) = line.strip_prefix("#[prost(").and_then(|rest| rest.strip_suffix(")]")) {
                attribute = (!inside.starts_with("oneof")).then(|| inside.to_owned());
            } else if let Some(inside) = attribute.take() {
                let kind = inside.split([',', ' ']).next().unwrap().to_owned();
                let tag = inside.split("tag = \"").nth(1).unwrap().trim_end_matches('"').to_owned();
                let name = match line.strip_prefix("pub ") {
                    Some(field) => format!("{kind} {}", field.split(':').next().unwrap()),
                    None => {
                        let variant = line.split('(').next().unwrap();
                        format!("{variant} {}", variant.to_lowercase())
                    }
                };
                fields.push(format!("{name} = {tag};"));
            }
        }
        fields
    }

    #[test]
    fn the_proto_file_says_the_same() {
        let proto = include_str!("../control.proto");
        let written: Vec<String> = proto
            .lines()
            .map(str::trim)
            .filter(|line| line.contains(" = ") && line.ends_with(';'))
            .map(str::to_owned)
            .collect();
        let written: Vec<String> = written.into_iter().filter(|line| !line.starts_with("syntax")).collect();
        assert_eq!(written, declared());
        assert!(proto.contains("package penstock.control.v1;") && proto.contains("service Control"));
    }

    #[test]
    fn a_message_is_encoded_as_protocol_buffers_say() {
        use prost::Message as _;
        let packet = Packet::of_frame(Frame::Message { number: 300, received: 1, body: Bytes::from_static(b"ab") });
        // Field 4, length-delimited, 9 bytes: field 1 varint 300, field 2 varint 1, field 3 bytes "ab".
        assert_eq!(packet.encode_to_vec(), [0x22, 9, 0x08, 0xac, 0x02, 0x10, 0x01, 0x1a, 2, b'a', b'b']);
        assert_eq!(Packet::decode(&*packet.encode_to_vec()).unwrap(), packet);
    }

    #[test]
    fn each_refusal_comes_back_as_itself() {
        for (refusal, number) in REFUSALS {
            assert_eq!((refusal.number(), Refusal::of(number)), (number, refusal));
        }
        assert_eq!(Refusal::of(99), Refusal::Unknown);
    }
}
