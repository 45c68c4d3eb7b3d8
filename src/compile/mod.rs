//! From source to machine code: what is compiled together ([`mod@unit`]), by what ([`nvrtc`]), on which threads ([`pool`]).
//!
//! An [`Artifact`] is the one compilation of one unit for one architecture, shared by everybody who wants it: those who
//! come while it runs wait for it, those who come later find it done, and if it fails all of them get the compiler's log.

pub mod architecture;
mod exit;
pub mod nvrtc;
pub mod pool;
mod sys;
pub mod unit;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

pub use architecture::Architecture;
pub use nvrtc::{Image, Nvrtc, Program};
pub use pool::Pool;

use crate::error::{Code, Error, Result};
use crate::sync::lock;

/// Something that turns a program into an image. Called from several threads at a time.
pub trait Compiler: Send + Sync {
    /// Compiles one program.
    ///
    /// # Errors
    /// No compiler, an architecture that it does not know, or a program that does not compile (with the compiler's log).
    fn compile(&self, program: &Program<'_>) -> Result<Image>;
}

/// NVRTC, found when the first program comes. That it was not found is not remembered: it may be installed later.
#[derive(Debug)]
pub struct NvrtcCompiler {
    explicit: Option<PathBuf>,
    library: Mutex<Option<Arc<Nvrtc>>>,
}

impl NvrtcCompiler {
    /// A compiler that uses the library at `explicit`, or searches for one.
    #[must_use]
    pub fn new(explicit: Option<PathBuf>) -> Self {
        Self { explicit, library: Mutex::new(None) }
    }

    /// The library.
    ///
    /// # Errors
    /// None was found; the text lists what was tried.
    pub fn library(&self) -> Result<Arc<Nvrtc>> {
        let mut library = lock(&self.library);
        if let Some(found) = &*library {
            return Ok(Arc::clone(found));
        }
        let found = Arc::new(Nvrtc::find(self.explicit.as_deref())?);
        let (major, minor) = found.version();
        log::info!("oeq-native: NVRTC {major}.{minor} at {}", found.path().display());
        *library = Some(Arc::clone(&found));
        Ok(found)
    }
}

impl Compiler for NvrtcCompiler {
    fn compile(&self, program: &Program<'_>) -> Result<Image> {
        self.library()?.compile(program)
    }
}

/// One compilation: waiting, running or done.
pub struct Artifact {
    state: Mutex<State>,
    finished: Condvar,
}

enum State {
    /// In the queue or being compiled, in the process of this id.
    Pending { ticket: Option<pool::Ticket>, process: u32 },
    /// No thread could be started; whoever waits runs it.
    Unstarted(pool::Job),
    /// Finished.
    Done(Result<Arc<Image>>),
}

impl fmt::Debug for Artifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match &*lock(&self.state) {
            State::Pending { .. } => "pending",
            State::Unstarted(_) => "unstarted",
            State::Done(Ok(_)) => "compiled",
            State::Done(Err(_)) => "failed",
        };
        write!(f, "Artifact({state})")
    }
}

impl Artifact {
    /// Starts a compilation on the pool. `work` runs once, on a worker or, where no thread can be had, on the first thread
    /// that waits.
    pub fn start(pool: &Pool, weight: u64, work: impl FnOnce() -> Result<Image> + Send + 'static) -> Arc<Self> {
        let process = std::process::id();
        let artifact =
            Arc::new(Self { state: Mutex::new(State::Pending { ticket: None, process }), finished: Condvar::new() });
        let own = Arc::clone(&artifact);
        let job: pool::Job = Box::new(move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work))
                .unwrap_or_else(|_| Err(Error::internal("the compilation panicked; this is a bug in oeq-native")));
            own.finish(outcome.map(Arc::new));
        });
        match pool.submit(weight, job) {
            Ok(new) => {
                // The job may be done by now.
                if let State::Pending { ticket, .. } = &mut *lock(&artifact.state) {
                    *ticket = Some(new);
                }
            }
            Err(job) => *lock(&artifact.state) = State::Unstarted(job),
        }
        artifact
    }

    /// An artifact that was there already.
    #[must_use]
    pub fn ready(image: Arc<Image>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Done(Ok(image))), finished: Condvar::new() })
    }

    fn finish(&self, outcome: Result<Arc<Image>>) {
        *lock(&self.state) = State::Done(outcome);
        self.finished.notify_all();
    }

    /// The outcome, if there is one yet. Never waits for the compiler.
    #[must_use]
    pub fn peek(&self) -> Option<Result<Arc<Image>>> {
        match &*lock(&self.state) {
            State::Done(outcome) => Some(outcome.clone()),
            State::Pending { .. } | State::Unstarted(_) => None,
        }
    }

    /// Whether a new attempt makes sense: it failed, or it was lost because the process forked.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        match &*lock(&self.state) {
            State::Done(outcome) => outcome.is_err(),
            State::Pending { process, .. } => *process != std::process::id(),
            State::Unstarted(_) => false,
        }
    }

    /// Waits for the outcome, moving the work to the front of the queue.
    ///
    /// # Errors
    /// The compilation's own.
    pub fn wait(&self, pool: &Pool) -> Result<Arc<Image>> {
        let mut state = lock(&self.state);
        match &*state {
            State::Pending { ticket: Some(ticket), .. } => {
                let ticket = *ticket;
                drop(state);
                pool.promote(ticket);
                state = lock(&self.state);
            }
            State::Unstarted(_) => {
                let pending = State::Pending { ticket: None, process: std::process::id() };
                if let State::Unstarted(job) = std::mem::replace(&mut *state, pending) {
                    drop(state);
                    job();
                    state = lock(&self.state);
                }
            }
            State::Pending { .. } | State::Done(_) => {}
        }
        loop {
            match &*state {
                State::Done(outcome) => return outcome.clone(),
                State::Pending { process, .. } if *process != std::process::id() => {
                    return Err(Error::new(
                        Code::Unavailable,
                        "the compilation was running when the process forked, and only the parent has it; \
                         compile the model again in this process",
                    ));
                }
                State::Pending { .. } | State::Unstarted(_) => {
                    state = self.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test should panic")]

    use super::*;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn image(byte: u8) -> Image {
        Image { code: vec![byte], symbols: Vec::new(), log: String::new() }
    }

    #[test]
    fn everybody_who_waits_gets_the_one_outcome() {
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        let pool = Pool::new(2);
        let gate = Arc::new(Barrier::new(5));
        let inside = Arc::clone(&gate);
        let artifact = Artifact::start(&pool, 1, move || {
            RUNS.fetch_add(1, Ordering::SeqCst);
            inside.wait();
            Err(Error::invalid("kernel.cu(3): error: no such thing"))
        });
        assert!(artifact.peek().is_none());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    gate.wait();
                    assert!(artifact.wait(&pool).unwrap_err().message().contains("no such thing"));
                });
            }
        });
        assert_eq!(RUNS.load(Ordering::SeqCst), 1);
        assert!(artifact.is_lost());
    }

    #[test]
    fn a_panic_in_the_compiler_is_an_error_for_those_who_wait() {
        let pool = Pool::new(1);
        let artifact = Artifact::start(&pool, 1, || panic!("injected"));
        assert_eq!(artifact.wait(&pool).unwrap_err().code(), Code::Internal);
        // The pool goes on.
        let next = Artifact::start(&pool, 1, || Ok(image(7)));
        assert_eq!(next.wait(&pool).unwrap().code, [7]);
    }

    #[test]
    fn without_a_thread_the_first_who_waits_does_the_work() {
        let own =
            Arc::new(Artifact { state: Mutex::new(State::Done(Ok(Arc::new(image(0))))), finished: Condvar::new() });
        let job_target = Arc::clone(&own);
        *lock(&own.state) = State::Unstarted(Box::new(move || job_target.finish(Ok(Arc::new(image(9))))));
        assert!(own.peek().is_none() && !own.is_lost());
        assert_eq!(own.wait(&Pool::new(1)).unwrap().code, [9]);
    }

    #[test]
    fn what_a_fork_left_behind_is_lost_and_says_so() {
        let state = State::Pending { ticket: None, process: std::process::id().wrapping_add(1) };
        let artifact = Artifact { state: Mutex::new(state), finished: Condvar::new() };
        assert!(artifact.is_lost());
        assert_eq!(artifact.wait(&Pool::new(1)).unwrap_err().code(), Code::Unavailable);
    }
}
