//! The few calls to the operating system that compiling needs and `std` does not offer.

use std::ffi::{CStr, OsStr, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// While this lives, the calling thread takes no asynchronous signal, and neither does any thread that it starts, for
/// that thread's whole life: a thread inherits the mask of the one that made it.
///
/// The process belongs to somebody else, whose handlers expect to run on that somebody's threads. Signals that a thread
/// raises by its own fault stay deliverable: blocking those would turn a crash handler into a silent kill.
pub(super) struct BlockedSignals {
    previous: libc::sigset_t,
}

impl BlockedSignals {
    /// Blocks the signals. `None` if the system refuses; then nothing has changed.
    pub(super) fn new() -> Option<Self> {
        let mut blocked = MaybeUninit::<libc::sigset_t>::uninit();
        let mut previous = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigfillset initialises the whole set that it is given, and sigdelset gets that set afterwards.
        // pthread_sigmask reads `blocked` and, where it returns 0, has written all of `previous`.
        unsafe {
            libc::sigfillset(blocked.as_mut_ptr());
            for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS] {
                libc::sigdelset(blocked.as_mut_ptr(), fault);
            }
            if libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), previous.as_mut_ptr()) != 0 {
                return None;
            }
            Some(Self { previous: previous.assume_init() })
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: `previous` is a whole set, written by pthread_sigmask; a null pointer says that the old mask is not
        // wanted. With these arguments the call cannot fail.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.previous, std::ptr::null_mut()) };
    }
}

/// How many cores the calling thread may run on. `None` if the system does not tell.
pub(super) fn affinity_cores() -> Option<usize> {
    // Room for 65536 cores: the kernel refuses a set smaller than its own, and `cpu_set_t` ends at 1024.
    let mut mask = [0_u64; 1024];
    // SAFETY: the buffer has the size that is passed, is aligned like `cpu_set_t` (an array of `c_ulong`), and the call
    // writes nothing outside it; any bits are a valid u64.
    let status = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    let cores = mask.iter().map(|word| word.count_ones() as usize).sum();
    (status == 0 && cores > 0).then_some(cores)
}

/// The file of the shared library (or program) that `address` lies in, as the loader was told it.
pub(super) fn file_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address, mapped or not, and writes `info` where it answers non-zero; zeroed bytes are a
    // valid Dl_info. The name it points to lives as long as the library stays loaded, and is copied here at once.
    unsafe {
        if libc::dladdr(address, info.as_mut_ptr()) == 0 {
            return None;
        }
        let name = info.assume_init().dli_fname;
        if name.is_null() {
            return None;
        }
        Some(PathBuf::from(OsStr::from_bytes(CStr::from_ptr(name).to_bytes())))
    }
}

/// Has a function run when the process ends by `exit` or by returning from `main`, before all that were registered
/// earlier. False if the system has no room for it.
pub(super) fn at_exit(handler: extern "C" fn()) -> bool {
    // SAFETY: the handler is a plain function, which stays loaded: libraries that hold it are pinned by `pin`.
    unsafe { libc::atexit(handler) == 0 }
}

/// Keeps the shared library that this code lies in loaded until the process ends, whoever closes it: its threads run its
/// code. Does nothing in a program, which nobody can unload.
pub(super) fn pin() {
    use std::os::unix::ffi::OsStringExt as _;
    let Some(file) = file_of(pin as *const c_void) else { return };
    let Ok(name) = std::ffi::CString::new(file.into_os_string().into_vec()) else { return };
    // SAFETY: the name is NUL-terminated. RTLD_NOLOAD opens nothing that is not loaded already, so no initialiser runs.
    // The handle is given up: with RTLD_NODELETE it is of no further use.
    unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE) };
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;

    /// The calling thread's blocked signals, bit n-1 for signal n, as the kernel reports them.
    fn blocked() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    }

    fn bit(signal: i32) -> u64 {
        1 << (signal - 1)
    }

    #[test]
    fn signals_are_blocked_in_a_new_thread_and_given_back_in_the_old_one() {
        let before = blocked();
        let guard = BlockedSignals::new().unwrap();
        let child = std::thread::spawn(blocked);
        drop(guard);
        let inside = child.join().unwrap();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGALRM, libc::SIGCHLD, libc::SIGPROF, libc::SIGUSR1] {
            assert_ne!(inside & bit(signal), 0, "signal {signal} reaches the worker");
        }
        for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            assert_eq!(inside & bit(signal), 0, "signal {signal} is blocked");
        }
        assert_eq!(blocked(), before);
    }

    #[test]
    fn the_affinity_mask_agrees_with_the_kernel() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let ranges = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        let listed: usize = ranges
            .trim()
            .split(',')
            .map(|range| match range.split_once('-') {
                Some((first, last)) => last.parse::<usize>().unwrap() - first.parse::<usize>().unwrap() + 1,
                None => 1,
            })
            .sum();
        assert_eq!(affinity_cores(), Some(listed));
    }

    #[test]
    fn an_address_leads_to_its_file() {
        let own = std::fs::canonicalize(file_of(affinity_cores as *const c_void).unwrap()).unwrap();
        assert_eq!(own, std::fs::canonicalize("/proc/self/exe").unwrap());
        assert_eq!(file_of(std::ptr::null()), None);
    }
}
