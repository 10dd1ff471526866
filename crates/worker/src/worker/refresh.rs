//! Changed settings and destinations. A part of [`Worker`].

use super::Worker;
use crate::destination::Destination;
use crate::runtime::{Changes, Refresh, Runtime};
use crate::settings::{Described, WorkerSettings};
use outbox_core::standbys::Progress;
use std::collections::HashSet;
use std::time::Instant;

impl<R: Runtime> Worker<R> {
    /// Reads the settings, then tends the leases. The settings come first: a change of them may be what ends a failure.
    /// Returns whether a new session is needed.
    pub(super) fn refresh(&mut self, now: Instant) -> Result<bool, R::Error> {
        let refreshed = self.refresh_now();
        if let Ok(true) = refreshed {
            return Ok(true);
        }
        // The first heartbeat makes the row that the reports belong to.
        self.tend_leases(now).and_then(|()| self.purge(now))?;
        refreshed
    }

    /// Reads changed settings and destinations and takes them over. Returns whether a new session is needed.
    fn refresh_now(&mut self) -> Result<bool, R::Error> {
        let found = self.common.runtime.refresh(self.refreshes_at_once)?;
        self.refreshes_at_once = false;
        match found {
            Refresh::Skipped => Ok(false),
            Refresh::NewSession => Ok(true),
            Refresh::Changed(news) => {
                let Changes {
                    not_adopted,
                    settings,
                    described,
                } = *news;
                if not_adopted != self.common.not_adopted {
                    self.common.not_adopted = not_adopted;
                    self.sweep_due = self.common.runtime.now(); // nothing announced the rows of a restored dump
                    self.wake_all();
                }
                if let Some(settings) = settings.filter(|settings| *settings != self.common.settings) {
                    self.take_settings(settings);
                }
                if let Some(described) = described.filter(|described| *described != self.described) {
                    self.describe(described);
                }
                Ok(false)
            }
        }
    }

    /// Takes over new settings, and the destinations under them.
    pub fn take_settings(&mut self, settings: WorkerSettings) {
        if settings.standbys != self.common.settings.standbys {
            self.common.standbys = Progress::default(); // what other standbys had, and how long messages waited for them
        }
        self.common.settings = settings;
        self.leases_due = self.common.runtime.now();
        let described = std::mem::take(&mut self.described);
        self.describe(described);
    }

    /// Takes over the described destinations: adds new ones, updates known ones, and retires dropped ones.
    pub fn describe(&mut self, described: Vec<Described>) {
        let targets = described
            .iter()
            .filter_map(|one| one.target(&self.common.settings).ok());
        self.common.targets = targets.collect();
        for description in &described {
            match self.roster.find(&description.name) {
                Some(known) => self.destinations[known].describe(&self.common, description),
                None => {
                    let mut new = {
                        let (held, leaving) = (&self.leases.held, &self.leases.leaving);
                        Destination::new(&self.common, description, self.sharing, held, leaving)
                    };
                    if let Some(task) = &self.task {
                        new.begin_request(task.request);
                    }
                    self.destinations.push(new);
                    self.needs_survey = true;
                }
            }
        }
        let names: HashSet<&str> = described.iter().map(|described| described.name.as_str()).collect();
        let gone = |destination: &&mut Destination<R>| !names.contains(destination.name.as_str());
        (self.destinations.iter_mut().filter(gone)).for_each(|destination| destination.retire(&self.common));
        self.described = described;
        self.reindex();
    }
}
