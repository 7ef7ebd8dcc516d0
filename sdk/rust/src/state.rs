//! How is state written? A version byte, the policy's name, then its values in an order that depends on nothing but the state.
//!
//! [`Writer`] and [`Reader`] carry single values; maps go in ascending order of their keys, so that equal state gives equal bytes.

use std::collections::BTreeMap;

use penstock_base::codec::{DecodeError, Reader, Writer};

/// Writes a map with numbers as keys, smallest first.
pub fn write_map<V>(out: &mut Writer, map: &BTreeMap<u64, V>, mut each: impl FnMut(&mut Writer, &V)) {
    out.list(map.iter(), |out, (key, value)| {
        out.u64(*key);
        each(out, value);
    });
}

/// Reads what [`write_map`] wrote. Keys out of order are damage.
pub fn read_map<V>(
    from: &mut Reader<'_>,
    mut each: impl FnMut(&mut Reader<'_>) -> Result<V, DecodeError>,
) -> Result<BTreeMap<u64, V>, DecodeError> {
    let mut map = BTreeMap::new();
    let mut left = from.u64()?;
    while left > 0 {
        let key = from.u64()?;
        if map.last_key_value().is_some_and(|(last, _)| *last >= key) {
            return Err(DecodeError::Invalid("key order"));
        }
        map.insert(key, each(from)?);
        left -= 1;
    }
    Ok(map)
}

/// Opens a blob: schema, then the name it belongs to.
pub(crate) fn open(out: &mut Writer, schema: u32, name: &str) {
    out.u8(schema as u8);
    out.blob(name.as_bytes());
}

/// Checks what [`open`] wrote. State of another policy is no state of this one, whatever its schema is called.
pub(crate) fn opened(from: &mut Reader<'_>, schema: u32, name: &str) -> Result<bool, DecodeError> {
    let is_version = u32::from(from.u8()?) == schema & 0xff;
    let mut is_name = from.u64()? == name.len() as u64;
    for byte in name.bytes() {
        is_name = is_name && from.u8()? == byte;
    }
    Ok(is_version && is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_written_smallest_key_first() {
        let (ascending, descending) = (BTreeMap::from([(1, 10u64), (9, 90)]), BTreeMap::from([(9, 90), (1, 10u64)]));
        let bytes = |map: &BTreeMap<u64, u64>| {
            let mut out = Writer::new();
            write_map(&mut out, map, |out, value| out.u64(*value));
            out.into_bytes()
        };
        assert_eq!(bytes(&ascending), bytes(&descending));
        let written = bytes(&ascending);
        let mut from = Reader::new(&written);
        assert_eq!(read_map(&mut from, |from| from.u64()), Ok(ascending));
    }

    #[test]
    fn keys_out_of_order_are_damage() {
        let mut out = Writer::new();
        out.u64(2);
        for key in [5, 0, 4, 0] {
            out.u64(key);
        }
        let bytes = out.into_bytes();
        let read = read_map(&mut Reader::new(&bytes), |from| from.u64());
        assert_eq!(read, Err(DecodeError::Invalid("key order")));
    }
}
