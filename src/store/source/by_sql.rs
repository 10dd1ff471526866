//! What functions of SQL ask of the source, in a session: the events of what a relay has claimed, and which events meet
//! criteria. It is read as everywhere else, for every caller: as the owner of the relation, restricted, read-only. The
//! session's own statement_timeout limits the time, and a cancel ends the call. The error of one row is that row's
//! alone.

use super::{AGGREGATE, CANCELED, CREATED_AT, PartKind, Pieces, Reader, SEQ, Source, TYPE};
use crate::error::{self, UserError};
use crate::pg::spi::{Spi, SpiResult};
use crate::pg::{catalog, txn};
use outbox_core::engine::Events;
use outbox_core::event::COLUMNS;
use outbox_core::message::Outcome;
use pgrx::PgSqlErrorCode;
use pgrx::datum::TimestampWithTimeZone;
use std::collections::HashSet;

/// Texts for each event in what `events` returns: seq, what is wrong and why, the columns, created_at.
const TEXTS: usize = COLUMNS.len() + 4;

/// What an event must be, as far as it is given.
pub struct Criteria {
    pub kind: Option<String>,
    pub aggregate_type: Option<String>,
    pub aggregate_id: Option<String>,
    pub created_from: Option<TimestampWithTimeZone>,
    pub created_to: Option<TimestampWithTimeZone>,
}

impl Source {
    /// The events of these seqs as texts, one event after the other: seq; what is wrong with it (`failed`, or
    /// `missing`: there is none), and why; its parts. It stops after `bytes_max`, but not before the first: what it
    /// does not return is not read. `seqs` are in order. `limited`: for a worker outside, which must renew its leases.
    pub fn events(&self, seqs: &[i64], bytes_max: usize, limited: bool) -> Result<Vec<Option<String>>, UserError> {
        let read = |reader| self.read_events(seqs, bytes_max, reader);
        let events = match limited {
            true => txn::with_own_limit(|| read(Reader::Worker)),
            false => read(Reader::Session),
        };
        let events = events.map_err(|why| self.canceled_or_unreadable(&why))?;
        Ok(texts_of(events))
    }

    /// The event of this seq as [`events`](Self::events) has it, read with the rights of `caller`: a view that shows it
    /// must not show more than the table would. Superusers read as the owner, because its expressions could do anything
    /// as them. What `caller` may not read is unreadable, with the reason.
    pub fn event_for(&self, seq: i64, caller: u32) -> Vec<Option<String>> {
        let refused = |why: String| {
            let fault = [Some(seq.to_string()), Some("unreadable".to_owned()), Some(why)];
            fault.into_iter().chain(std::iter::repeat_n(None, TEXTS - 3)).collect()
        };
        let reader = match caller {
            _ if catalog::is_superuser(caller) => Reader::Session,
            _ if catalog::may_leave_the_database(caller) => {
                return refused(format!(
                    "the expressions of {} run as the reader, and a role with rights on the files or programs of the server must not run them",
                    self.relation
                ));
            }
            _ => Reader::Caller(caller),
        };
        match self.read_events(&[seq], usize::MAX, reader) {
            Ok(events) => texts_of(events),
            Err(why) if why.ends_with(CANCELED) => self.canceled_or_unreadable(&why).raise(),
            Err(why) => refused(why),
        }
    }

    /// Those of these seqs whose event meets the criteria. One that cannot be read, or whose seq has two rows, meets
    /// none; a warning reports it.
    pub fn matching(&self, seqs: &[i64], criteria: &Criteria) -> Result<Vec<i64>, UserError> {
        let sql = self.matching_sql();
        let read = |piece: &[i64], _: &[_], rows: &mut Vec<(i64, bool)>| {
            let read = Spi::connect_mut(|client| {
                let args = [
                    piece.to_vec().into(),
                    criteria.kind.clone().into(),
                    criteria.aggregate_type.clone().into(),
                    criteria.aggregate_id.clone().into(),
                    criteria.created_from.into(),
                    criteria.created_to.into(),
                ];
                let rows = client.update(sql.as_str(), None, &args)?;
                rows.map(|row| Ok((row.get(1)?.unwrap_or_default(), row.get(2)?.unwrap_or_default())))
                    .collect::<SpiResult<Vec<(i64, bool)>>>()
            });
            rows.extend(read.map_err(|error| error.to_string())?);
            Ok(true)
        };
        let read = self.read_in_pieces(seqs, Reader::Session, read, |_| false);
        let Pieces { rows, mut failed, .. } = read.map_err(|why| self.canceled_or_unreadable(&why))?;
        let (mut seen, mut twice) = (HashSet::new(), HashSet::new());
        for (seq, _) in &rows {
            if !seen.insert(*seq) && twice.insert(*seq) {
                failed.push((*seq, format!("{} has more than one row with it", self.relation)));
            }
        }
        if let Some((seq, why)) = failed.first() {
            let (count, relation) = (failed.len(), &self.relation);
            let what = "event(s) of";
            error::warning(
                format!("{count} {what} {relation} cannot be read and are left out, one of them with seq {seq}: {why}"),
                "Correct these rows, or the expressions of the source.",
            );
        }
        let met = rows.into_iter().filter(|(seq, meets)| *meets && !twice.contains(seq));
        Ok(met.map(|(seq, _)| seq).collect())
    }

    fn matching_sql(&self) -> String {
        let column = |part, kind| self.column(part, kind);
        format!(
            "select x.seq, ($2 is null or x.type = $2) and ($3 is null or x.aggregate_type = $3)
               and ($4 is null or x.aggregate_id = $4) and ($5 is null or x.created_at >= $5)
               and ($6 is null or x.created_at < $6)
             from (select {seq} as seq, {kind} as type, {created_at} as created_at, {aggregate_type} as aggregate_type,
                          {aggregate_id} as aggregate_id
                   from {relation} as r where {by} = any ($1)) x",
            seq = column(SEQ, PartKind::Seq),
            kind = column(TYPE, PartKind::Text),
            created_at = column(CREATED_AT, PartKind::Time),
            aggregate_type = column(AGGREGATE[0], PartKind::Text),
            aggregate_id = column(AGGREGATE[1], PartKind::Text),
            relation = self.relation,
            by = self.expression(SEQ),
        )
    }

    fn canceled_or_unreadable(&self, why: &str) -> UserError {
        if !why.ends_with(CANCELED) {
            return self.unreadable(why);
        }
        UserError::new(
            PgSqlErrorCode::ERRCODE_QUERY_CANCELED,
            format!("{} was being read: {why}", self.relation),
            "Ask for less at once, or raise statement_timeout.",
        )
    }
}

/// Events as [`Source::events`] returns them.
fn texts_of(events: Events) -> Vec<Option<String>> {
    let mut texts = Vec::with_capacity(events.len() * TEXTS);
    for (seq, event) in events {
        texts.push(Some(seq.to_string()));
        match event {
            Ok(event) => {
                texts.extend([None, None]);
                texts.extend(event.texts().map(|text| text.map(str::to_owned)));
                texts.push(Some(event.created_at));
            }
            Err(outcome) => {
                let (fault, why) = match outcome {
                    Outcome::Unsendable { reason } => ("missing", reason),
                    Outcome::Failed { reason } => ("failed", reason),
                    other => ("failed", format!("{other:?}")),
                };
                texts.extend([Some(fault.to_owned()), Some(why)]);
                texts.extend(std::iter::repeat_n(None, TEXTS - 3));
            }
        }
    }
    texts
}
