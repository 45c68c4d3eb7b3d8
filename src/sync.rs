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

/// A value that each process has for itself. After a fork the child has neither its parent's threads nor a lock that can be
/// trusted: a thread that no longer exists may hold it. So a value carries its process, and whoever finds another's makes a
/// new one. The parent's is never dropped in the child: its destructors may want locks that nobody will give back.
#[derive(Debug)]
pub(crate) struct OfProcess<T>(ArcSwap<(u32, Arc<T>)>);

impl<T> OfProcess<T> {
    /// This process's, at first.
    pub(crate) fn new(value: T) -> Self {
        Self(ArcSwap::from_pointee((std::process::id(), Arc::new(value))))
    }

    /// That of a process, made now if what is there is another's.
    pub(crate) fn of(&self, process: u32, make: impl FnOnce() -> T) -> Arc<T> {
        let current = self.0.load_full();
        if current.0 == process {
            return Arc::clone(&current.1);
        }
        mem::forget(Arc::clone(&current.1));
        self.0.compare_and_swap(&current, Arc::new((process, Arc::new(make()))));
        Arc::clone(&self.0.load().1)
    }
}

impl<T: Default> Default for OfProcess<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T: Default> OfProcess<Mutex<T>> {
    /// Calls `body` with what is in this process's lock, which is held meanwhile.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        body(&mut lock(&self.of(std::process::id(), Mutex::default)))
    }

    /// The same, if nobody holds the lock.
    pub(crate) fn try_with<R>(&self, body: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.of(std::process::id(), Mutex::default).try_lock().ok().map(|mut value| body(&mut value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_does_not_wait_for_what_its_parent_holds() {
        let value = OfProcess::<Mutex<Vec<u32>>>::default();
        let of = |process| value.of(process, Mutex::default);
        let (parent, child) = (std::process::id(), std::process::id() + 1);
        let held = of(parent);
        let mut held = lock(&held);
        held.push(1);
        assert!(value.try_with(|_| ()).is_none());
        lock(&of(child)).push(2);
        assert_eq!(*lock(&of(child)), [2]);
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
