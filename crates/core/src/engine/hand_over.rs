//! Hands ready messages over to the publisher, in order and as far as it has room. A message that several workers
//! crashed with, or that may make the destination fail, goes alone. Called by the worker's main thread in each pass.

use super::{CRASHES_ALONE, Engine};
use crate::key_order::MessageHandle;
use crate::message::Publication;

impl Engine {
    /// Gives the ready messages to the publisher, in order, until those that it has take [`Bounds::bytes`]: the others can
    /// still be released if the destination hangs. `publish` returns those that it has no room for; they stay ready.
    ///
    /// [`Bounds::bytes`]: super::Bounds::bytes
    pub fn hand_over(&mut self, now_ms: u64, mut publish: impl FnMut(Vec<Publication>) -> Vec<Publication>) {
        let mut batch = Vec::with_capacity(self.ready.len());
        let is_first = self.with_publisher.count == 0;
        while self.alone.is_none()
            && self.has_room_in_bytes()
            && let Some(handle) = self.ready.front().copied()
        {
            let Some(message) = self.messages.get_mut(&handle) else {
                self.ready.pop_front();
                continue;
            };
            let goes_alone = message.pointer.crashes >= CRASHES_ALONE || self.suspects.goes_alone(&message.pointer);
            if goes_alone && self.with_publisher.count > 0 {
                break;
            }
            self.ready.pop_front();
            if let Some(Ok(publication)) = message.publication.take() {
                self.with_publisher.more(message);
                batch.push(publication);
            }
            if goes_alone {
                self.alone = Some(handle);
            }
        }
        if batch.is_empty() {
            return;
        }
        self.answers.handed_over(is_first, now_ms);
        let awaited = batch.iter().map(|publication| publication.handle);
        let awaited: Vec<MessageHandle> = awaited.filter(|handle| self.is_awaited(*handle)).collect();
        self.answers.await_those(awaited);
        for refused in publish(batch).into_iter().rev() {
            let handle = refused.handle;
            self.with_publisher.less(self.messages.get(&handle));
            self.alone = self.alone.filter(|alone| *alone != handle);
            self.answers.on_end(handle);
            if let Some(message) = self.messages.get_mut(&handle) {
                message.publication = Some(Ok(refused));
                self.ready.push_front(handle);
            }
        }
    }
}
