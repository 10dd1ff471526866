//! Which destinations take part in a pass: those that have something in flight, or that something has come for. A part of
//! [`Worker`].

use super::{Pause, Worker};
use crate::destination::Destination;
use crate::rewinds::RewindGroup;
use crate::runtime::Runtime;
use std::collections::HashMap;

#[derive(Default)]
pub(super) struct Roster {
    /// The destinations that take part in this pass, by their index, in the order in which they joined it.
    active: Vec<usize>,
    /// Whether each destination takes part.
    is_active: Vec<bool>,
    /// When the first of the others wakes, in ms since the worker began.
    next_wake_ms: u64,
    by_name: HashMap<String, usize>,
    /// The group of each destination, in order of the indexes.
    groups: Vec<RewindGroup>,
    /// These groups, each once.
    distinct: Vec<RewindGroup>,
}

impl Roster {
    /// The destinations of this pass. Others may join it meanwhile.
    pub fn active(&self) -> impl Iterator<Item = usize> + use<> {
        self.active.clone().into_iter()
    }

    pub fn find(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The groups of all destinations, each once.
    pub fn distinct_groups(&self) -> &[RewindGroup] {
        &self.distinct
    }

    /// The destinations whose groups are in a lane.
    pub fn in_lane(&self, is_in: impl Fn(RewindGroup) -> bool) -> Vec<usize> {
        (0..self.groups.len())
            .filter(|index| is_in(self.groups[*index]))
            .collect()
    }

    /// In how many ms the first of those that sleep wakes.
    pub fn wakes_in_ms(&self, now_ms: u64) -> u32 {
        u32::try_from(self.next_wake_ms.saturating_sub(now_ms)).unwrap_or(u32::MAX)
    }
}

impl<R: Runtime> Worker<R> {
    /// Finds the destinations of this pass. Called again after steps that may wake others.
    pub(super) fn gather(&mut self) {
        let now_ms = self.common.now_ms();
        let Roster {
            active,
            is_active,
            next_wake_ms,
            ..
        } = &mut self.roster;
        active.clear();
        is_active.clear();
        *next_wake_ms = u64::MAX;
        for (index, destination) in self.destinations.iter_mut().enumerate() {
            let sleeps_until_ms = destination.begin_pass(now_ms);
            is_active.push(sleeps_until_ms.is_none());
            match sleeps_until_ms {
                Some(until_ms) => *next_wake_ms = until_ms.min(*next_wake_ms),
                None => active.push(index),
            }
        }
    }

    /// Lets a destination join the pass. Returns false if it takes part already.
    pub(super) fn wake(&mut self, index: usize) -> bool {
        self.destinations[index].wake();
        let joins = !std::mem::replace(&mut self.roster.is_active[index], true);
        if joins {
            self.roster.active.push(index);
        }
        joins
    }

    /// Lets all destinations take part in the next pass.
    pub(super) fn wake_all(&mut self) {
        self.destinations.iter_mut().for_each(Destination::wake);
    }

    /// Called when destinations were added or removed.
    pub(super) fn reindex(&mut self) {
        let runtime = &self.common.runtime;
        let names: Vec<&str> = self.destinations.iter().map(|destination| &*destination.name).collect();
        runtime.serves(&names);
        self.roster.by_name = (names.iter().zip(0..))
            .map(|(name, index)| ((*name).to_owned(), index))
            .collect();
        self.roster.groups = names.iter().map(|name| runtime.rewind_group(name)).collect();
        self.roster.distinct.clone_from(&self.roster.groups);
        self.roster.distinct.sort_unstable();
        self.roster.distinct.dedup();
        self.common.serves_several = names.len() > 1;
        self.gather();
    }

    /// Removes dropped destinations of which nothing is left, and their reported state.
    pub(super) fn remove_retired(&mut self, pause: &mut Pause) -> Result<(), R::Error> {
        let gone = |index: &usize| self.destinations[*index].has_retired();
        let mut gone: Vec<usize> = self.roster.active().filter(gone).collect();
        gone.sort_unstable();
        let mut removed = false;
        for index in gone.into_iter().rev() {
            let runtime = &self.common.runtime;
            match runtime.report(&self.destinations[index].name, None, None) {
                Ok(()) => {
                    self.destinations.remove(index);
                    removed = true;
                }
                Err(error) => pause.shorten(runtime.failed(error)?),
            }
        }
        if removed {
            self.reindex();
        }
        Ok(())
    }

    /// The number of messages in flight, and whether outcomes or settles are awaited.
    pub(super) fn in_flight(&self) -> (usize, bool) {
        let active = || self.roster.active.iter().map(|index| &self.destinations[*index]);
        (
            active().map(Destination::outstanding).sum(),
            active().any(Destination::awaits),
        )
    }

    /// Takes the requests of sessions to recheck connections.
    pub(super) fn take_recheck_requests(&mut self) {
        if self.common.runtime.are_rechecks_requested() {
            for destination in &mut self.destinations {
                self.refreshes_at_once |= destination.take_recheck_request(&self.common);
            }
        }
    }
}
