//! Locks that outlive a panic: the data under our mutexes is valid between any two statements, so a poisoned lock is taken.
//!
//! Debug builds count the locks that each thread takes, so that a test can prove the warm path takes none.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;

/// Locks `mutex`.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(debug_assertions)]
    let _ = counted::LOCKS.try_with(|locks| locks.set(locks.get() + 1));
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value that each process makes for itself, under a lock that may be held for long. A fork in that time leaves a child
/// with a lock that nobody will ever give back; the child makes its own.
#[derive(Debug)]
pub(crate) struct OfProcess<T>(ArcSwap<(u32, Mutex<T>)>);

impl<T: Default> Default for OfProcess<T> {
    fn default() -> Self {
        Self(ArcSwap::from_pointee((std::process::id(), Mutex::default())))
    }
}

impl<T: Default> OfProcess<T> {
    /// Calls `body` with the value. The lock is held meanwhile.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        body(&mut lock(&self.of(std::process::id()).1))
    }

    /// The same, if nobody holds the lock.
    pub(crate) fn try_with<R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.of(std::process::id()).1.try_lock().ok().map(|mut value| body(&mut value))
    }

    fn of(&self, process: u32) -> Arc<(u32, Mutex<T>)> {
        let current = self.0.load_full();
        if current.0 == process {
            return current;
        }
        // The parent's is not dropped: its destructor may want what only the parent has.
        mem::forget(Arc::clone(&current));
        self.0.compare_and_swap(&current, Arc::new((process, Mutex::default())));
        self.0.load_full()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_does_not_wait_for_what_its_parent_holds() {
        let value = OfProcess::<Vec<u32>>::default();
        let (parent, child) = (std::process::id(), std::process::id() + 1);
        let held = value.of(parent);
        let mut held = lock(&held.1);
        held.push(1);
        assert!(value.try_with(|_| ()).is_none());
        lock(&value.of(child).1).push(2);
        assert_eq!(*lock(&value.of(child).1), [2]);
        assert_eq!(*held, [1]);
    }
}

#[cfg(debug_assertions)]
mod counted {
    use std::cell::Cell;

    thread_local! {
        pub(super) static LOCKS: Cell<usize> = const { Cell::new(0) };
    }
}

/// Locks that this thread has taken so far; debug builds only.
#[cfg(debug_assertions)]
#[must_use]
pub fn locks_taken() -> usize {
    counted::LOCKS.try_with(std::cell::Cell::get).unwrap_or(0)
}
