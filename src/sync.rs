//! Locks that outlive a panic: the data under our mutexes is valid between any two statements, so a poisoned lock is taken.
//!
//! Debug builds count the locks that each thread takes, so that a test can prove the warm path takes none.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    #[cfg(debug_assertions)]
    let _ = counted::LOCKS.try_with(|locks| locks.set(locks.get() + 1));
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
