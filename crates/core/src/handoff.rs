//! A handoff: a message as bytes, with its event unless that is in a source. A session copies it into a slot in shared
//! memory before it commits, and a worker reads it there. Both run the same build in the same server, so the format has
//! no version. `src/session/fast_path.rs` packs it, `src/shared/fast_path.rs` unpacks it.

use crate::event::{Event, EventRow};
use crate::message::Pointer;
use crate::partition::Partition;

/// The length of a text that is null.
const NONE: u32 = u32::MAX;

/// Packs a message that has just been enqueued: it was never claimed, failed or replayed, and does not expire. Without
/// its event the worker reads that.
pub fn pack(pointer: &Pointer, event: Option<&Event>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(256 + event.map_or(0, |event| event.payload.len()));
    let partition = i64::from(pointer.partition.as_i16());
    for number in [pointer.seq, partition, pointer.enqueued_at_us] {
        put_number(&mut bytes, number);
    }
    put(&mut bytes, Some(&pointer.destination));
    put(&mut bytes, pointer.key.as_deref());
    put_number(&mut bytes, i64::from(event.is_some()));
    let Some(event) = event else {
        return bytes;
    };
    for text in event.texts() {
        put(&mut bytes, text);
    }
    put(&mut bytes, Some(&event.created_at));
    put_number(&mut bytes, event.created_at_s);
    bytes
}

/// Unpacks the bytes of [`pack`]; None if they are anything else. `lease_epoch` is 0: the worker that takes the message
/// sets it.
pub fn unpack(mut bytes: &[u8]) -> Option<(Pointer, Option<Event>)> {
    let from = &mut bytes;
    let seq = number(from)?;
    let partition = Partition::new(number(from)?).ok()?;
    let enqueued_at_us = number(from)?;
    let pointer = Pointer {
        seq,
        destination: text(from)??.into(),
        partition,
        key: text(from)?,
        attempts: 0,
        crashes: 0,
        lease_epoch: 0,
        replayed: false,
        enqueued_at_us,
        expires_at_us: None,
    };
    let event = match number(from)? {
        0 => None,
        1 => Some(Event::read(seq, &mut Packed(from)).ok()?),
        _ => return None,
    };
    bytes.is_empty().then_some((pointer, event))
}

/// The packed columns of an event, one after the other.
struct Packed<'a, 'b>(&'a mut &'b [u8]);

impl EventRow for Packed<'_, '_> {
    /// The bytes are cut off, or are not a packed event.
    type Error = ();

    fn text(&mut self) -> Result<Option<String>, ()> {
        text(self.0).ok_or(())
    }

    fn number(&mut self) -> Result<Option<i64>, ()> {
        number(self.0).map(Some).ok_or(())
    }
}

fn put_number(bytes: &mut Vec<u8>, number: i64) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

fn put(bytes: &mut Vec<u8>, text: Option<&str>) {
    let length = text.map_or(NONE, |text| u32::try_from(text.len()).unwrap_or(NONE));
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(text.unwrap_or_default().as_bytes());
}

fn take<'a>(from: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = from.split_at_checked(length)?;
    *from = rest;
    Some(taken)
}

fn number(from: &mut &[u8]) -> Option<i64> {
    Some(i64::from_le_bytes(take(from, 8)?.try_into().ok()?))
}

/// Reads a text; None = the bytes are not valid, Some(None) = the text is null.
fn text(from: &mut &[u8]) -> Option<Option<String>> {
    match u32::from_le_bytes(take(from, 4)?.try_into().ok()?) {
        NONE => Some(None),
        length => Some(Some(str::from_utf8(take(from, length as usize)?).ok()?.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn a_message(texts: &[Option<String>], numbers: [i64; 3], partition: i16) -> (Pointer, Event) {
        let text = |index: usize| texts.get(index).cloned().flatten();
        let some = |index: usize| text(index).unwrap_or_default();
        let event = Event {
            id: some(0),
            seq: numbers[0],
            kind: some(1),
            aggregate_type: text(2),
            aggregate_id: text(3),
            operation: text(4),
            payload: some(5),
            previous_payload: text(6),
            metadata: text(7),
            headers: text(8),
            actor: text(9),
            correlation_id: text(10),
            created_at: some(11),
            created_at_s: numbers[1],
        };
        let pointer = Pointer {
            seq: numbers[0],
            destination: some(12).into(),
            partition: Partition::new(i64::from(partition)).expect("in range"),
            key: text(13),
            attempts: 0,
            crashes: 0,
            lease_epoch: 0,
            replayed: false,
            enqueued_at_us: numbers[2],
            expires_at_us: None,
        };
        (pointer, event)
    }

    proptest! {
        #[test]
        fn a_packed_message_is_unpacked_unchanged(
            texts in proptest::collection::vec(any::<Option<String>>(), 14), numbers: [i64; 3], partition in 0_i16..1024,
            has_event: bool,
        ) {
            let (pointer, event) = a_message(&texts, numbers, partition);
            let event = has_event.then_some(event);
            prop_assert_eq!(unpack(&pack(&pointer, event.as_ref())), Some((pointer, event)));
        }

        #[test]
        fn truncated_or_foreign_bytes_are_refused(
            texts in proptest::collection::vec(any::<Option<String>>(), 14), cut in 1_usize..60, noise: Vec<u8>,
            has_event: bool,
        ) {
            let (pointer, event) = a_message(&texts, [1, 2, 3], 4);
            let bytes = pack(&pointer, has_event.then_some(&event));
            prop_assert_eq!(unpack(&bytes[..bytes.len().saturating_sub(cut)]), None);
            let _ = unpack(&noise); // the result does not matter; it must not panic
        }
    }
}
