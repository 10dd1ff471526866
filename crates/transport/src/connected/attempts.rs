//! Messages by number, and publishes that the client has not answered yet. Runs on the publisher thread; the thread of the
//! client wakes them.
//!
//! A client resolves each publish twice: when it is written, and when the peer confirms it. To wake the thread for each
//! costs more than the publish. So the thread of the client only notes which attempt it woke, and wakes the thread once
//! enough are noted.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};

/// Items by a number that rises by one from item to item. They may be taken in any order.
pub(crate) struct Numbered<T> {
    items: VecDeque<Option<T>>,
    /// The number of the first in `items`, which is there unless `items` is empty.
    first: u64,
    len: usize,
}

impl<T> Default for Numbered<T> {
    fn default() -> Self {
        let items = VecDeque::new();
        Self {
            items,
            first: 0,
            len: 0,
        }
    }
}

impl<T> Numbered<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of the next item.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.items.len() as u64
    }

    /// Adds an item. Returns its number.
    pub(crate) fn push(&mut self, item: T) -> u64 {
        self.items.push_back(Some(item));
        self.len += 1;
        self.next() - 1
    }

    pub(crate) fn take(&mut self, number: u64) -> Option<T> {
        let index = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let item = self.items.get_mut(index)?.take()?;
        self.len -= 1;
        while self.items.pop_front_if(|item| item.is_none()).is_some() {
            self.first += 1;
        }
        Some(item)
    }

    /// The item with the lowest number.
    pub(crate) fn oldest(&self) -> Option<&T> {
        self.items.front()?.as_ref()
    }

    /// The items with their numbers, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        let numbered = (self.first..).zip(&self.items);
        numbered.filter_map(|(number, item)| Some((number, item.as_ref()?)))
    }

    /// As `iter`, to change the items.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut T)> {
        let numbered = (self.first..).zip(&mut self.items);
        numbered.filter_map(|(number, item)| Some((number, item.as_mut()?)))
    }

    /// Takes all items, in the order of their numbers.
    pub(crate) fn take_all(&mut self) -> impl Iterator<Item = T> + use<T> {
        self.first = self.next();
        self.len = 0;
        std::mem::take(&mut self.items).into_iter().flatten()
    }
}

/// Publishes, each in two steps: lapin writes it, then the broker confirms it. They are polled when they are added, and
/// then only after they were woken.
pub(crate) struct Attempts<W, C> {
    places: Vec<AttemptSlot<W, C>>,
    /// The places without an attempt.
    free: Vec<usize>,
    unwritten: usize,
    noted: Arc<Noted>,
    /// The places that are polled now. Empty otherwise: only its memory is kept.
    woken: Vec<usize>,
}

/// The place of an attempt, and of others after it. A late wake of an attempt only lets the next one be polled once
/// more.
struct AttemptSlot<W, C> {
    waker: Waker,
    seq: u64,
    step: Option<Step<W, C>>,
}

enum Step<W, C> {
    Write(Pin<Box<W>>),
    Confirm(C),
}

impl<W, C> Default for Attempts<W, C> {
    fn default() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
            unwritten: 0,
            noted: Arc::default(),
            woken: Vec::new(),
        }
    }
}

impl<W, C, T, E> Attempts<W, C>
where
    W: Future<Output = Result<C, E>>,
    C: Future<Output = Result<T, E>> + Unpin,
{
    /// The number of publishes that lapin has not written yet.
    pub(crate) fn unwritten(&self) -> usize {
        self.unwritten
    }

    /// Whether none is without a result.
    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Adds a publish and polls it. Returns its result if that is ready.
    pub(crate) fn add(&mut self, seq: u64, write: W) -> Option<Result<T, E>> {
        let place = self.free.pop().unwrap_or_else(|| self.new_place());
        (self.places[place].seq, self.places[place].step) = (seq, Some(Step::Write(Box::pin(write))));
        self.unwritten += 1;
        self.poll(place).map(|(_, result)| result)
    }

    fn new_place(&mut self) -> usize {
        let (noted, place) = (Arc::clone(&self.noted), self.places.len());
        let waker = Waker::from(Arc::new(PlaceWaker { noted, place }));
        let (seq, step) = (0, None);
        self.places.push(AttemptSlot { waker, seq, step });
        place
    }

    /// Takes the results of all that are ready now. If A was resolved before B, and B is among them, A is among them,
    /// or was taken before: A was noted before B was resolved, and this ends when nothing is noted any more. Returns
    /// whether any had been woken.
    pub(crate) fn take_ready(&mut self, results: &mut Vec<(u64, Result<T, E>)>) -> bool {
        let mut are_woken = false;
        let mut woken = std::mem::take(&mut self.woken);
        loop {
            std::mem::swap(&mut woken, &mut self.noted.lock().places);
            if woken.is_empty() {
                self.woken = woken;
                return are_woken;
            }
            are_woken = true;
            for place in woken.drain(..) {
                results.extend(self.poll(place));
            }
        }
    }

    /// The seq and the result of the attempt in this place, if it is ready.
    fn poll(&mut self, place: usize) -> Option<(u64, Result<T, E>)> {
        let AttemptSlot { waker, seq, step } = &mut self.places[place];
        let mut context = Context::from_waker(waker);
        let result = loop {
            match step.as_mut()? {
                Step::Write(write) => {
                    let Poll::Ready(written) = write.as_mut().poll(&mut context) else {
                        return None;
                    };
                    self.unwritten -= 1;
                    match written {
                        Ok(confirm) => *step = Some(Step::Confirm(confirm)),
                        Err(error) => break Err(error),
                    }
                }
                Step::Confirm(confirm) => match Pin::new(confirm).poll(&mut context) {
                    Poll::Ready(result) => break result,
                    Poll::Pending => return None,
                },
            }
        };
        *step = None;
        self.free.push(place);
        Some((*seq, result))
    }

    /// Whether any has been woken since [`take_ready`](Self::take_ready).
    pub(crate) fn are_woken(&self) -> bool {
        !self.noted.lock().places.is_empty()
    }

    /// Completes once attempts have been woken this number of times since [`take_ready`](Self::take_ready).
    pub(crate) async fn woken(&self, times: usize) {
        poll_fn(|cx| {
            let mut noted = self.noted.lock();
            if noted.places.len() >= times {
                return Poll::Ready(());
            }
            noted.task = Some((times, cx.waker().clone()));
            Poll::Pending
        })
        .await;
    }
}

/// What lapin's thread tells the publisher thread.
#[derive(Default)]
struct Noted(Mutex<NotedAttempts>);

#[derive(Default)]
struct NotedAttempts {
    /// The places that were woken.
    places: Vec<usize>,
    /// The task that waits, and the length of `places` at which it is woken.
    task: Option<(usize, Waker)>,
}

impl Noted {
    fn lock(&self) -> MutexGuard<'_, NotedAttempts> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

struct PlaceWaker {
    noted: Arc<Noted>,
    place: usize,
}

impl Wake for PlaceWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let mut noted = self.noted.lock();
        noted.places.push(self.place);
        let count = noted.places.len();
        let task = noted.task.take_if(|(times, _)| count >= *times);
        drop(noted);
        if let Some((_, waker)) = task {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::future::{Ready, ready};
    use std::rc::Rc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A future that is ready once its number is below `ready`, and puts its waker into `wakers`.
    async fn resolved(number: usize, ready: Rc<Cell<usize>>, wakers: Rc<Cell<Vec<Waker>>>) -> Result<usize, usize> {
        poll_fn(|cx| {
            let mut all = wakers.take();
            all.push(cx.waker().clone());
            wakers.set(all);
            if number < ready.get() {
                Poll::Ready(Ok(number))
            } else {
                Poll::Pending
            }
        })
        .await
    }

    type Confirm = Pin<Box<dyn Future<Output = Result<usize, usize>>>>;

    /// Adds an attempt that is written at once and confirmed like [`resolved`].
    fn add_written(
        attempts: &mut Attempts<Ready<Result<Confirm, usize>>, Confirm>,
        number: usize,
        ready: &Rc<Cell<usize>>,
        wakers: &Rc<Cell<Vec<Waker>>>,
    ) -> Option<Result<usize, usize>> {
        let confirm: Confirm = Box::pin(resolved(number, ready.clone(), wakers.clone()));
        attempts.add(number as u64, std::future::ready(Ok(confirm)))
    }

    /// The number of attempts without a result.
    fn open<W, C>(attempts: &Attempts<W, C>) -> usize {
        attempts.places.len() - attempts.free.len()
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_attempts_that_were_woken_are_polled_and_all_that_are_ready_are_taken() {
        let (ready, wakers) = (Rc::new(Cell::new(1)), Rc::new(Cell::new(Vec::new())));
        let mut attempts = Attempts::default();
        let add = |attempts: &mut Attempts<_, _>, number| add_written(attempts, number, &ready, &wakers);
        assert_eq!(add(&mut attempts, 0), Some(Ok(0)), "ready when it is added");
        (1..5).for_each(|number| assert_eq!(add(&mut attempts, number), None));
        let mut taken = Vec::new();
        attempts.take_ready(&mut taken);
        assert!(taken.is_empty());
        ready.set(4);
        attempts.take_ready(&mut taken);
        assert!(taken.is_empty(), "not woken");
        // In the order in which they were woken; 4 is woken in vain, 2 twice.
        let woken = wakers.take();
        [4, 2, 3, 2, 1].iter().for_each(|number| woken[*number].wake_by_ref());
        attempts.take_ready(&mut taken);
        assert_eq!(taken, [2, 3, 1].map(|number| (number as u64, Ok(number))));
        ready.set(5);
        woken[4].wake_by_ref();
        attempts.take_ready(&mut taken);
        assert_eq!((taken.pop(), open(&attempts)), (Some((4, Ok(4))), 0));
    }

    /// A write that is complete once its number is below `ready`. The second fails; the others are confirmed at once.
    async fn written(
        number: usize,
        ready: Rc<Cell<usize>>,
        wakers: Rc<Cell<Vec<Waker>>>,
    ) -> Result<Ready<Result<usize, usize>>, usize> {
        match resolved(number, ready, wakers).await {
            Ok(1) => Err(1),
            number => Ok(std::future::ready(number)),
        }
    }

    #[test]
    fn a_write_counts_until_it_is_complete() {
        let (ready, wakers) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(Vec::new())));
        let mut attempts = Attempts::default();
        let add = |attempts: &mut Attempts<_, _>, number| {
            attempts.add(number as u64, written(number, ready.clone(), wakers.clone()))
        };
        (0..3).for_each(|number| assert_eq!(add(&mut attempts, number), None));
        assert_eq!(attempts.unwritten(), 3);
        ready.set(9);
        wakers.take().iter().for_each(Waker::wake_by_ref);
        let mut taken = Vec::new();
        attempts.take_ready(&mut taken);
        assert_eq!(taken, [(0, Ok(0)), (1, Err(1)), (2, Ok(2))]);
        assert_eq!(attempts.unwritten(), 0);
        assert_eq!(add(&mut attempts, 3), Some(Ok(3)));
        assert_eq!(attempts.unwritten(), 0);
    }

    #[test]
    fn a_late_wake_of_an_attempt_that_is_over_does_no_harm_to_the_next_in_its_place() {
        let (ready, wakers) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(Vec::new())));
        let mut attempts = Attempts::default();
        let add = |attempts: &mut Attempts<_, _>, number| add_written(attempts, number, &ready, &wakers);
        let take = |attempts: &mut Attempts<_, _>| {
            let mut taken = Vec::new();
            attempts.take_ready(&mut taken);
            taken
        };
        assert_eq!(add(&mut attempts, 0), None);
        ready.set(1);
        let late = wakers.take().remove(0);
        late.wake_by_ref();
        assert_eq!(take(&mut attempts), [(0, Ok(0))]);
        late.wake_by_ref();
        assert_eq!(take(&mut attempts), []);
        assert_eq!(add(&mut attempts, 1), None);
        late.wake_by_ref();
        assert_eq!(take(&mut attempts), []);
        ready.set(2);
        wakers.take().iter().for_each(Waker::wake_by_ref);
        assert_eq!(take(&mut attempts), [(1, Ok(1))]);
        assert_eq!((open(&attempts), attempts.places.len()), (0, 1));
    }

    #[test]
    fn a_drain_takes_ready_attempts_behind_attempts_that_are_woken_while_polled() {
        type Confirm = Pin<Box<dyn Future<Output = Result<u32, ()>>>>;
        let mut attempts: Attempts<Ready<Result<Confirm, ()>>, Confirm> = Attempts::default();
        for n in 0..10 {
            let mut polls = 0;
            let confirm: Confirm = Box::pin(poll_fn(move |cx| {
                polls += 1;
                cx.waker().wake_by_ref(); // as lapin's thread may do at this moment
                match polls > 4 {
                    true => Poll::Ready(Ok(n)),
                    false => Poll::Pending,
                }
            }));
            assert_eq!(attempts.add(n.into(), ready(Ok(confirm))), None);
        }
        assert_eq!(attempts.add(10, ready(Ok(Box::pin(std::future::pending())))), None);
        let mut taken = Vec::new();
        assert!(attempts.take_ready(&mut taken));
        let all = (0..10).map(|n| (u64::from(n), Ok(n))).collect();
        assert_eq!((taken, open(&attempts)), (all, 1));
        assert!(!attempts.take_ready(&mut Vec::new()));
    }

    #[test]
    fn the_task_is_woken_once_when_enough_attempts_were() {
        let (ready, wakers) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(Vec::new())));
        let mut attempts = Attempts::default();
        (0..4).for_each(|number| {
            assert_eq!(add_written(&mut attempts, number, &ready, &wakers), None);
        });
        let count = Arc::new(Count::default());
        let task = Waker::from(Arc::clone(&count));
        let poll = |times| {
            let mut woken = Box::pin(attempts.woken(times));
            woken.as_mut().poll(&mut Context::from_waker(&task)).is_ready()
        };
        let all = wakers.take();
        assert!(!poll(3));
        all[0].wake_by_ref();
        assert!(!poll(3), "it may ask again");
        all[1].wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        all[2].wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
        all[3].wake_by_ref();
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "it runs already");
        assert!(poll(4) && poll(0), "those that were woken before it asks count");
    }

    #[test]
    fn numbered_items_are_taken_in_any_order() {
        let mut items = Numbered::default();
        assert_eq!([10, 11, 12, 13].map(|item| items.push(item)), [0, 1, 2, 3]);
        assert_eq!([2, 2].map(|number| items.take(number)), [Some(12), None]);
        assert_eq!((items.len(), items.oldest(), items.next()), (3, Some(&10), 4));
        assert_eq!(items.iter().collect::<Vec<_>>(), [(0, &10), (1, &11), (3, &13)]);
        assert_eq!([0, 1, 1].map(|number| items.take(number)), [Some(10), Some(11), None]);
        assert_eq!((items.len(), items.oldest(), items.next()), (1, Some(&13), 4));
        assert_eq!(items.push(14), 4);
        assert_eq!(items.take_all().collect::<Vec<_>>(), [13, 14]);
        assert!(items.is_empty() && items.oldest().is_none());
        assert_eq!(items.push(15), 5);
    }
}
