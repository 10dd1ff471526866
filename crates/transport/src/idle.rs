//! Which idle connections are closed, so that many destinations do not hold a thread and two descriptors
//! each for ever. A message opens the connection again.
//!
//! Used on the publisher thread alone. A few connections stay for as long as the worker lives: to
//! connect costs a broker more than to keep. Beyond them a connection ends when it was idle for long, and beyond
//! `OPEN_MAX` the one that is idle for longest ends as soon as another one opens.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

/// The number of idle connections that stay open.
const KEPT_MAX: usize = 32;
/// The number of connections above which none may be idle.
const OPEN_MAX: usize = 256;
/// How long another idle connection stays open.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// The open connections of all destinations of a worker.
#[derive(Default)]
pub struct OpenConnections {
    /// Without those that were told to end.
    open: Cell<usize>,
    /// The idle ones of them, the one that is idle for longest first.
    idle: RefCell<VecDeque<Rc<Notify>>>,
}

impl OpenConnections {
    /// Counts a new connection.
    pub(crate) fn opened(self: &Rc<Self>) -> OpenConnection {
        self.open.set(self.open.get() + 1);
        self.make_room();
        OpenConnection {
            all: Rc::clone(self),
            idle_since: None,
            ends: Rc::default(),
        }
    }

    /// Tells the connection that is idle for longest to end, if too many are open.
    fn make_room(&self) {
        if self.open.get() > OPEN_MAX
            && let Some(oldest) = self.idle.borrow_mut().pop_front()
        {
            self.open.set(self.open.get() - 1);
            oldest.notify_one();
        }
    }

    /// Removes an idle connection. Returns false if it was told to end.
    fn remove(&self, ends: &Rc<Notify>) -> bool {
        let mut idle = self.idle.borrow_mut();
        let at = idle.iter().position(|other| Rc::ptr_eq(other, ends));
        at.and_then(|at| idle.remove(at)).is_some()
    }
}

/// A connection that is open.
pub(crate) struct OpenConnection {
    all: Rc<OpenConnections>,
    idle_since: Option<Instant>,
    ends: Rc<Notify>,
}

impl OpenConnection {
    /// Records whether there is nothing to do over the connection.
    pub(crate) fn set_idle(&mut self, is_idle: bool) {
        match (is_idle, self.idle_since) {
            (true, None) => {
                self.idle_since = Some(Instant::now());
                self.all.idle.borrow_mut().push_back(Rc::clone(&self.ends));
                self.all.make_room();
            }
            (false, Some(_)) => {
                self.idle_since = None;
                if !self.all.remove(&self.ends) {
                    // A message came first.
                    self.ends = Rc::default();
                    self.all.open.set(self.all.open.get() + 1);
                }
            }
            _ => {}
        }
    }

    /// Completes when this idle connection is to end.
    pub(crate) async fn ends(&self) {
        let mut at = self.idle_since.unwrap_or_else(Instant::now) + IDLE_MAX;
        loop {
            tokio::select! {
                () = self.ends.notified() => return,
                () = sleep_until(at) => {}
            }
            if self.all.open.get() > KEPT_MAX {
                return;
            }
            at += IDLE_MAX;
        }
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        if self.idle_since.is_none() || self.all.remove(&self.ends) {
            self.all.open.set(self.all.open.get() - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    fn is_to_end(open: &OpenConnection) -> bool {
        open.ends().now_or_never().is_some()
    }

    #[test]
    fn the_connection_that_is_idle_for_longest_makes_room() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        let _context = runtime.enter();
        let open = Rc::new(OpenConnections::default());
        let mut all: Vec<OpenConnection> = (0..OPEN_MAX).map(|_| open.opened()).collect();
        all.iter_mut().take(3).for_each(|open| open.set_idle(true));
        assert!(!is_to_end(&all[0]));
        let _one = open.opened();
        assert_eq!(
            all.iter().take(3).map(is_to_end).collect::<Vec<_>>(),
            [true, false, false]
        );
        all[1].set_idle(false);
        let _another = open.opened();
        assert_eq!(
            all.iter().take(3).map(is_to_end).collect::<Vec<_>>(),
            [false, false, true]
        );
        assert_eq!(open.open.get(), OPEN_MAX);
        drop(all);
        assert_eq!((open.open.get(), open.idle.borrow().len()), (2, 0));
    }
}
