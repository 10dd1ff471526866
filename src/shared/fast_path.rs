//! The fast path: a small message goes from the session to the worker of its lane through shared memory. The worker
//! sends it before it claims the row. The table stays authoritative: a message that does not take the fast path, or is
//! withdrawn, is announced by *rewind*, like any other commit.
//!
//! | step | file | run by |
//! |---|---|---|
//! | the statement decides whether the message may take the fast path | src/session/fast_path.rs | the session, in its statement |
//! | message and event become bytes | the same, crates/core/src/handoff.rs | the session, in its statement |
//! | the bytes are copied into a slot before COMMIT, and ready after it | the same | the session, in its callbacks |
//! | a slot holds them until then | this file | both |
//! | the worker takes them, and reads events of a source: they are fast-path in flight | this file, crates/core/src/engine/receive.rs | the worker |
//!
//! # Order
//!
//! The steps of each side, in their order. crates/core/tests/model_fast_path.rs tries every interleaving, and shows for
//! each rule what breaks without it.
//!
//! A session
//! 1. announces the key before it draws a seq (`transactions`);
//! 2. copies the message into a slot before its row is visible, so a worker that claims the row finds the slot;
//! 3. marks the slot ready once the transaction is committed. Then it checks again which worker reads the lane: a new
//!    worker may have begun before the message was in the slot. If so, the session withdraws the message;
//! 4. lowers *rewind* for each message that did not take the fast path, then frees its entry of open transactions, then
//!    wakes the workers.
//!
//! A worker
//! 1. takes what is ready, then reads the open transactions, then reads what is ready by then, and reads *rewind* last;
//! 2. takes nothing of a lane that it has not read to its end;
//! 3. withdraws the slots of the rows that it has claimed, before it hands their messages over;
//! 4. withdraws all slots of a lane that it takes over. Their rows may be removed without a claim, and then no other
//!    process would withdraw them.
//!
//! A process that withdraws a ready message
//! 1. lowers *rewind* first, or for a moment nothing would announce the row;
//! 2. cannot end between withdrawing the message and freeing the slot.
//!
//! # Slots
//!
//! A *slot* holds one message. Its state determines which process may change it:
//!
//! | state | the slot is | may be changed by |
//! |---|---|---|
//! | FREE | free | a session that takes it |
//! | FILLED | filled; its transaction commits | that session: READY or FREE; a process that claims the row: REVOKED |
//! | READY | committed | the worker that takes it: TAKEN; that session, a process that claims the row, and a worker that cannot read it: FREE |
//! | TAKEN | fast-path in flight | the worker that has it: FREE |
//! | REVOKED | claimed, or of a lane that has another owner | the session that filled it: FREE |
//!
//! A row is visible only after its slot was FILLED. So a process that claims a row and then checks the slots either
//! finds the slot, or no worker will ever take it.

use crate::pg::seen::Seen;
use crate::pg::shmem::{Shareable, SharedStruct};
use crate::pg::{catalog, latch};
use crate::shared::databases;
use outbox_core::engine::{Arrived, RowId, SlotId};
use outbox_core::handoff;
use outbox_core::message::Pointer;
use outbox_core::partition::{Partition, crc32};
use outbox_worker::rewinds::{RewindGroup, RewindLane};
use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};

/// The most bytes that a slot holds. A larger message, with its event, goes through the table alone.
pub const BYTES: usize = 4032;

/// Slots for messages of all databases. Further messages go through the table alone.
const SLOTS: usize = 256;

const FREE: u64 = 0;
const FILLED: u64 = 1;
const READY: u64 = 2;
const TAKEN: u64 = 3;
const REVOKED: u64 = 4;
const STATE_BITS: u32 = 8;

#[repr(C)]
pub(in crate::shared) struct FastSlots {
    /// A bit for each slot that is not free. Set by the session that takes the slot, cleared by the process that frees
    /// it; read by all.
    used: [AtomicU64; SLOTS / 64],
    slots: [FastSlot; SLOTS],
}

/// One slot. The table above says which process writes `state`. The session that fills the slot writes the other
/// fields, and the processes that change its state read them.
#[repr(C)]
struct FastSlot {
    /// The state in the lower 8 bits. The bits above hold a number that grows each time the slot is freed, so that no
    /// process mistakes the next message for the one it saw.
    state: AtomicU64,
    /// The process number + 1 of the session that has the slot; 0 = it is free, or committed.
    session: AtomicU32,
    database: AtomicU32,
    /// The worker that owned the lane when the slot was filled: the index + 1 of its entry.
    owner: AtomicU32,
    /// CRC-32 of the name of the destination.
    destination: AtomicU32,
    partition: AtomicU32,
    seq: AtomicI64,
    block: AtomicU32,
    line: AtomicU32,
    length: AtomicU32,
    bytes: [AtomicU64; BYTES / 8],
}

// SAFETY: only atomics and arrays of them; zero is a valid value of each.
unsafe impl Shareable for FastSlots {}

pub(in crate::shared) static AREA: SharedStruct<FastSlots> = SharedStruct::new(c"outbox fast path");

fn area() -> Option<&'static FastSlots> {
    AREA.get()
}

/// The slots that are not free.
fn used() -> impl Iterator<Item = (SlotId, &'static FastSlot)> {
    let area = area();
    let words = area.into_iter().flat_map(|area| area.used.iter().enumerate());
    let bits = words.flat_map(|(index, word)| {
        let mut left = word.load(SeqCst);
        std::iter::from_fn(move || {
            let bit = left.trailing_zeros();
            left &= left.wrapping_sub(1);
            (bit < 64).then_some(index * 64 + bit as usize)
        })
    });
    bits.filter_map(move |index| Some((index as SlotId, area?.slots.get(index)?)))
}

fn slot(slot_id: SlotId) -> Option<&'static FastSlot> {
    area()?.slots.get(slot_id as usize)
}

impl FastSlot {
    fn is_in(&self, state: u64) -> Option<u64> {
        let word = self.state.load(SeqCst);
        (word & ((1 << STATE_BITS) - 1) == state).then_some(word)
    }

    /// Returns false if another process changed the state first.
    fn transition(&self, from: u64, to: u64) -> bool {
        let after = from >> STATE_BITS << STATE_BITS | to;
        self.state.compare_exchange(from, after, SeqCst, SeqCst).is_ok()
    }

    fn is_of(&self, destination: u32, partition: Partition, seq: i64) -> bool {
        self.seq.load(Relaxed) == seq && self.in_lane(destination, partition)
    }

    fn in_lane(&self, destination: u32, partition: Partition) -> bool {
        self.destination.load(Relaxed) == destination && self.in_partition(partition)
    }

    /// Whether this is the message.
    fn has(&self, pointer: &Pointer) -> bool {
        self.is_of(crc32(&pointer.destination), pointer.partition, pointer.seq)
    }

    /// Whether the message is of this partition of this database.
    fn in_partition(&self, partition: Partition) -> bool {
        self.partition.load(Relaxed) == u32::from(partition.index())
            && self.database.load(Relaxed) == catalog::my_database()
    }
}

/// Frees a slot. The caller is the only process that may: see the table above.
pub fn free(slot_id: SlotId) {
    let (Some(area), Some(slot)) = (area(), slot(slot_id)) else {
        return;
    };
    slot.session.store(0, SeqCst);
    let word = slot.state.load(SeqCst);
    slot.state
        .store(((word >> STATE_BITS) + 1) << STATE_BITS | FREE, SeqCst);
    let bit = 1 << (slot_id % 64);
    if let Some(word) = area.used.get(slot_id as usize / 64) {
        word.fetch_and(!bit, SeqCst);
    }
}

/// A message that may be copied into a slot when this transaction commits.
pub struct Handoff {
    pub lane: RewindLane,
    pub partition: Partition,
    pub seq: i64,
    /// CRC-32 of the destination's name.
    pub destination: u32,
    /// Its row in `outbox`, and the row of its event. None: the worker reads the event from a source.
    pub row: Seen,
    pub event: Option<Seen>,
    /// Message and event, encoded by crates/core/src/handoff.rs.
    pub bytes: Vec<u8>,
    /// Its slot, once it is copied into one.
    pub slot_id: Option<SlotId>,
}

// ---- a session ------------------------------------------------------------------------------------------------------

/// Whether there are slots at all, that is, shared memory.
pub fn is_there() -> bool {
    area().is_some()
}

/// Copies a message of this transaction, which is about to commit, into a slot. None: its lane has no worker in this
/// server, or no slot is free.
pub fn copy_to_slot(handoff: &Handoff) -> Option<SlotId> {
    let owner = databases::my_database()?.reader_in_server(handoff.lane, handoff.partition)?;
    let RowId { block, line } = handoff.row.row_id();
    let slot_id = reserve()?;
    let slot = slot(slot_id)?;
    slot.session.store(latch::my_proc_number() as u32 + 1, SeqCst);
    slot.database.store(catalog::my_database(), Relaxed);
    slot.owner.store(owner, Relaxed);
    slot.destination.store(handoff.destination, Relaxed);
    slot.partition.store(u32::from(handoff.partition.index()), Relaxed);
    slot.seq.store(handoff.seq, Relaxed);
    slot.block.store(block, Relaxed);
    slot.line.store(u32::from(line), Relaxed);
    slot.length.store(handoff.bytes.len() as u32, Relaxed);
    for (word, chunk) in slot.bytes.iter().zip(handoff.bytes.chunks(8)) {
        let mut eight = [0; 8];
        eight[..chunk.len()].copy_from_slice(chunk);
        word.store(u64::from_le_bytes(eight), Relaxed);
    }
    let word = slot.state.load(SeqCst);
    slot.state.store(word >> STATE_BITS << STATE_BITS | FILLED, SeqCst);
    Some(slot_id)
}

fn reserve() -> Option<SlotId> {
    let area = area()?;
    let words = area.used.len();
    let first = latch::my_proc_number().unsigned_abs() as usize % words; // so that sessions rarely use the same word
    (0..words).map(|step| (first + step) % words).find_map(|index| {
        let word = area.used.get(index)?;
        loop {
            let seen = word.load(SeqCst);
            let bit = (!seen).trailing_zeros();
            if bit == 64 {
                return None;
            }
            if word.fetch_or(1 << bit, SeqCst) & (1 << bit) == 0 {
                return Some((index * 64) as SlotId + bit);
            }
        }
    })
}

/// Marks a slot ready, because the transaction is committed and visible. False: the message was withdrawn, or its lane
/// has another reader now, and the caller must rewind the lane. Called in the commit callback, so it neither allocates
/// nor raises an error.
pub fn ready(slot_id: SlotId, lane: RewindLane, partition: Partition) -> bool {
    let Some(slot) = slot(slot_id) else { return false };
    slot.session.store(0, SeqCst); // from READY on, other processes may free it
    let Some(word) = slot.is_in(FILLED).filter(|word| slot.transition(*word, READY)) else {
        free(slot_id); // revoked
        return false;
    };
    let reader = databases::my_database().and_then(|database| database.reader_in_server(lane, partition));
    if reader == Some(slot.owner.load(Relaxed)) {
        return true;
    }
    let ready = word >> STATE_BITS << STATE_BITS | READY;
    let is_back = slot.transition(ready, REVOKED);
    if is_back {
        free(slot_id);
    }
    !is_back
}

/// Frees the slots of the session with this process number, which has ended without the end of its transaction. Neither
/// allocates nor raises an error.
pub(super) fn session_ends(proc_number: i32) {
    for (slot_id, slot) in used().filter(|(_, slot)| slot.session.load(SeqCst) == proc_number as u32 + 1) {
        withdraw(slot_id, slot);
        free(slot_id);
    }
}

// ---- a worker -------------------------------------------------------------------------------------------------------

/// Takes the ready messages in the lanes that this worker reads.
pub fn take(worker: u32) -> Vec<Arrived> {
    let Some(database) = databases::my_database() else {
        return Vec::new();
    };
    let mut taken = Vec::new();
    for (slot_id, slot) in used() {
        let ready = slot.is_in(READY).filter(|_| slot.owner.load(Relaxed) == worker);
        let Some(word) = ready else { continue };
        let length = (slot.length.load(Relaxed) as usize).min(BYTES);
        let words = slot.bytes.iter().take(length.div_ceil(8));
        let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        bytes.truncate(length);
        let Some((pointer, event)) = handoff::unpack(&bytes).filter(|(pointer, _)| slot.has(pointer)) else {
            withdraw(slot_id, slot);
            continue;
        };
        let lane = RewindGroup::of(&pointer.destination).lane(pointer.partition);
        if database.reader_in_server(lane, pointer.partition) == Some(worker) && slot.transition(word, TAKEN) {
            let row_id = RowId {
                block: slot.block.load(Relaxed),
                line: slot.line.load(Relaxed) as u16,
            };
            taken.push(Arrived {
                slot: slot_id,
                row_id,
                pointer,
                event,
            });
        }
    }
    taken
}

/// The lowest seq that is ready in each lane of a destination, and not taken.
pub fn lowest_ready(destination: &str) -> HashMap<Partition, i64> {
    let (crc, database) = (crc32(destination), catalog::my_database());
    let mut lowest = HashMap::new();
    for (_, slot) in used() {
        let is_its = slot.destination.load(Relaxed) == crc && slot.database.load(Relaxed) == database;
        if slot.is_in(READY).is_some()
            && is_its
            && let Ok(partition) = Partition::new(i64::from(slot.partition.load(Relaxed)))
        {
            let seq = slot.seq.load(Relaxed);
            let low = lowest.entry(partition).or_insert(seq);
            *low = seq.min(*low);
        }
    }
    lowest
}

/// Withdraws the slots of claimed rows of a destination, so that no worker takes them from now on. The rows were seen
/// in a snapshot before this call. `claimed` is sorted by seq.
pub fn revoke(destination: &str, claimed: &[(Partition, i64)]) {
    if claimed.is_empty() {
        return;
    }
    let crc = crc32(destination);
    for (slot_id, slot) in used() {
        let seq = slot.seq.load(Relaxed);
        let near = claimed.partition_point(|(_, claimed)| *claimed < seq);
        let mut same = claimed[near..].iter().take_while(|(_, claimed)| *claimed == seq);
        if same.any(|(partition, seq)| slot.is_of(crc, *partition, *seq)) {
            withdraw(slot_id, slot);
        }
    }
}

/// Withdraws the slot of one message; any process may call it. Returns false if the message is fast-path in flight.
pub fn withdraw_unless_taken(destination: &str, partition: Partition, seq: i64) -> bool {
    let crc = crc32(destination);
    let mut found = used().filter(|(_, slot)| slot.is_of(crc, partition, seq));
    !found.any(|(slot_id, slot)| {
        !withdraw(slot_id, slot) && slot.is_in(TAKEN).is_some() && slot.is_of(crc, partition, seq)
    })
}

/// Whether this message is fast-path in flight now.
pub fn is_taken(destination: &str, partition: Partition, seq: i64) -> bool {
    let crc = crc32(destination);
    used().any(|(_, slot)| slot.is_of(crc, partition, seq) && slot.is_in(TAKEN).is_some())
}

/// Withdraws a message, so that no worker takes it from now on. Returns false if a worker has already taken it.
fn withdraw(slot_id: SlotId, slot: &FastSlot) -> bool {
    loop {
        if let Some(word) = slot.is_in(FILLED) {
            if slot.transition(word, REVOKED) {
                return true; // its session frees the slot and rewinds the lane
            }
        } else if let Some(word) = slot.is_in(READY) {
            // Rewind first. Otherwise for a moment neither this slot nor *rewind* would announce the row, and a later
            // one could overtake it.
            rewind_lanes(slot);
            if slot.transition(word, REVOKED) {
                free(slot_id);
                return true;
            }
        } else {
            return slot.is_in(TAKEN).is_none();
        }
    }
}

/// Rewinds the lanes of the message's partition, so that their reader finds the row in the table.
fn rewind_lanes(slot: &FastSlot) {
    let partition = Partition::new(i64::from(slot.partition.load(Relaxed)));
    if let (Ok(partition), Some(database)) = (partition, databases::database(slot.database.load(Relaxed))) {
        RewindLane::all(partition).for_each(|lane| database.rewind_to(lane, partition, slot.seq.load(Relaxed)));
    }
}

/// Withdraws all messages of a partition. This worker reads its lanes from now on, and from their start, so the slots
/// were filled for an earlier owner.
pub fn begin_lane(partition: Partition) {
    for (slot_id, slot) in used().filter(|(_, slot)| slot.in_partition(partition)) {
        withdraw(slot_id, slot);
    }
}

/// Withdraws the messages for a worker that has ended, and frees those that it had taken. Called as the worker exits,
/// after `WorkerEntry::quit`.
pub fn worker_ends(worker: u32) {
    for (slot_id, slot) in used().filter(|(_, slot)| slot.owner.load(Relaxed) == worker) {
        withdraw(slot_id, slot);
        if let Some(word) = slot.is_in(TAKEN).filter(|_| slot.owner.load(Relaxed) == worker)
            && slot.transition(word, REVOKED)
        {
            free(slot_id);
        }
    }
}
