//! Settles messages of a destination that were all published, without a statement: deletes their rows in outbox, and
//! writes the history. That is nearly every settle. outbox_internal.settle() does the same in all other cases;
//! tests/differential.rs compares the two ways.

use crate::pg::catalog;
use crate::pg::spi::types::{INT2ARRAYOID, TEXTOID, TIMESTAMPTZOID};
use crate::pg::spi::{SpiClient, SpiResult};
use crate::pg::table::{self, Table, clock_timestamp};
use crate::pg::text;
use crate::store::rows::{self, HISTORY, MESSAGE};
use crate::store::statement::SavedStatement;
use outbox_core::engine::Settlement;
use outbox_core::settle::Disposition;
use pgrx::datum::TimestampWithTimeZone;
use pgrx::spi::quote_identifier;
use std::cell::Cell;
use std::collections::HashSet;

pub struct PublishedRows {
    outbox: u32,
    history: u32,
    default_partition: u32,
    hold_leases: SavedStatement,
    find_partition: SavedStatement,
    /// The partition of the history that was found last, its times, and `table::changes` before.
    partition: Cell<Option<(u32, i64, i64, u64)>>,
}

impl PublishedRows {
    pub fn open(client: &SpiClient) -> SpiResult<Self> {
        let schema = catalog::extension(c"outbox").schema;
        let table = |name| catalog::table_in(schema, name);
        let leases = format!("{}.outbox_partitions", quote_identifier(catalog::schema_name(schema)));
        // The fence: what this worker holds now, locked until COMMIT. The next owner then sees all that was settled
        // under it.
        let hold = format!(
            "select partition, lease_epoch from {leases} where lease_owner = $1 and partition = any ($2)
             order by partition for key share"
        );
        let find = "select partition::oid::bigint, starts_at, ends_at from outbox_internal.history_partitions()
                    where ($1 < ends_at) is not false order by starts_at nulls first";
        Ok(Self {
            outbox: table(c"outbox"),
            history: table(c"outbox_history"),
            default_partition: table(c"outbox_history_default"),
            hold_leases: client.prepare_mut(&hold, &[TEXTOID, INT2ARRAYOID])?.into(),
            find_partition: client.prepare_mut(find, &[TIMESTAMPTZOID])?.into(),
            partition: Cell::new(None),
        })
    }

    /// Returns the number of rows that changed. None if nothing was done, because these messages need a statement.
    pub fn settle(&self, client: &mut SpiClient, worker: &str, batch: &[Settlement]) -> SpiResult<Option<usize>> {
        let Some(first) = batch.first() else {
            return Ok(Some(0));
        };
        let is_usual = |Settlement {
                            pointer, disposition, ..
                        }: &Settlement| {
            let is_leased = pointer.lease_epoch > 0;
            *disposition == Disposition::Publish && is_leased && pointer.destination == first.pointer.destination
        };
        if !batch.iter().all(is_usual) {
            return Ok(None);
        }
        let (outbox, history) = (Table::open(self.outbox), Table::open(self.history));
        let at = clock_timestamp();
        let partition = self.partition_at(client, at)?.map(Table::open);
        let may = outbox.is(&MESSAGE) && history.is_left_alone() && outbox.may_change() && history.may_insert();
        let usual = partition.as_ref().filter(|partition| may && partition.is(&HISTORY));
        let changed = usual.map(|partition| self.write(client, worker, batch, (&outbox, partition), at));
        let changed = changed.transpose()?;
        partition.into_iter().chain([history, outbox]).for_each(Table::close);
        Ok(changed)
    }

    fn write(
        &self,
        client: &mut SpiClient,
        worker: &str,
        batch: &[Settlement],
        (outbox, history): (&Table, &Table),
        at: i64,
    ) -> SpiResult<usize> {
        let partitions: HashSet<i16> = batch.iter().map(|one| one.pointer.partition.as_i16()).collect();
        let args = [worker.into(), partitions.into_iter().collect::<Vec<_>>().into()];
        let held = client.update(&*self.hold_leases, None, &args)?;
        let held = held.map(|row| Ok((row.get::<i16>(1)?, row.get::<i64>(2)?)));
        let held: HashSet<_> = held.collect::<SpiResult<_>>()?;
        let destination = text::to_server(&batch[0].pointer.destination);
        let places: Vec<_> = batch.iter().map(|settlement| settlement.row_id).collect();
        let published = outbox.delete(&places, |index, row| {
            let pointer = &batch[index].pointer;
            let (partition, epoch) = (pointer.partition.as_i16(), pointer.lease_epoch);
            // It carries this worker's token or none: it was in flight on the fast path before any claim.
            let is_it = rows::is_message(row, pointer, &destination)
                && rows::claim_token(row).is_none_or(|token| token == epoch)
                && held.contains(&(Some(partition), Some(epoch)));
            is_it.then(|| history.form(&rows::published(row, at)))
        });
        history.insert_all(&published);
        Ok(published.len())
    }

    /// The partition of the history for this time. None: a partition has other bounds than two times.
    fn partition_at(&self, client: &SpiClient, at: i64) -> SpiResult<Option<u32>> {
        let changes = table::changes_from_now(self.history);
        let is_known = |known: &(u32, i64, i64, u64)| known.3 == changes && (known.1..known.2).contains(&at);
        if let Some(known) = self.partition.get().filter(is_known) {
            return Ok(Some(known.0));
        }
        let moment = TimestampWithTimeZone::try_from(at).ok();
        let mut found = client.select(&*self.find_partition, Some(1), &[moment.into()])?;
        let (partition, from, to) = match found.next() {
            None => (self.default_partition, at, i64::MAX),
            Some(row) => {
                let time = |column| SpiResult::Ok(row.get::<TimestampWithTimeZone>(column)?.map(i64::from));
                let (Some(partition), Some(from), Some(to)) = (row.get::<i64>(1)?, time(2)?, time(3)?) else {
                    return Ok(None);
                };
                match from <= at {
                    true => (partition as u32, from, to),
                    false => (self.default_partition, at, from),
                }
            }
        };
        self.partition.set(Some((partition, from, to, changes)));
        Ok(Some(partition))
    }
}
