//! A process that ends while the compiler is at work.
//!
//! `exit` destroys the compiler's static data while its threads still use it, and the process that wanted to end quietly
//! dies of a segmentation fault instead. So every compilation is counted, and a handler that runs at exit before the
//! compiler's own cleaning up refuses new ones and waits for those that run. Newer compilers can be stopped half-way:
//! they ask [`leaving`], and the wait is a fraction of a second. Older ones end what they have begun, which takes seconds.
//!
//! Exit handlers run in the opposite order of their registration. [`watch`] must therefore come after the compiler was
//! loaded *and* has compiled something for the architecture in question, since it registers some of its cleaning up as
//! late as that.

use std::process;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::sys;
use crate::error::{Code, Error, Result};

/// The longest that exit is held up, for compilers that cannot be stopped: well above the time of the largest program.
const PATIENCE: Duration = Duration::from_secs(60);

static LEAVING: AtomicBool = AtomicBool::new(false);

/// The process in the upper half, its running compilations in the lower one. A count that was inherited through a fork
/// is about threads that do not exist here, and counts as zero.
static RUNNING: AtomicU64 = AtomicU64::new(0);

/// One compilation, from before the compiler is entered until after it was left.
pub(super) struct Running(());

impl Running {
    /// Counts a compilation. An error if the process is ending.
    pub(super) fn enter() -> Result<Self> {
        let own = own_part();
        let _ = RUNNING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| Some((own | count(old, own)) + 1));
        let running = Self(());
        // Counted first and asked afterwards, while the handler says first and counts afterwards: one sees the other.
        if leaving() { Err(ending()) } else { Ok(running) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let own = own_part();
        let less = |old| (count(old, own) > 0).then(|| old - 1);
        let _ = RUNNING.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

/// Whether the process is ending, so that no compilation should go on.
pub(super) fn leaving() -> bool {
    LEAVING.load(Ordering::SeqCst)
}

/// What becomes of a compilation in a process that is ending.
pub(super) fn ending() -> Error {
    Error::new(Code::Unavailable, "not compiled: the process is ending")
}

/// Makes exit wait from now on. May be called again, after more was registered; waiting twice costs nothing.
pub(super) fn watch() {
    if !sys::at_exit(wait) {
        log::debug!("oeq-native: no room for an exit handler: ending the process while compiling may crash it");
    }
}

extern "C" fn wait() {
    LEAVING.store(true, Ordering::SeqCst);
    let own = own_part();
    let start = Instant::now();
    // Polling, because a lock might be held for ever by a thread that a fork did not bring along.
    while count(RUNNING.load(Ordering::SeqCst), own) > 0 && start.elapsed() < PATIENCE {
        thread::sleep(Duration::from_millis(1));
    }
}

fn own_part() -> u64 {
    u64::from(process::id()) << 32
}

const fn count(running: u64, own: u64) -> u64 {
    if running >> 32 == own >> 32 { running & 0xffff_ffff } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_belongs_to_its_process() {
        assert_eq!(count(7 << 32 | 3, 7 << 32), 3);
        assert_eq!(count(7 << 32 | 3, 8 << 32), 0);
        assert_eq!(count(0, 7 << 32), 0);
    }
}
