//! From source to machine code: what is compiled together ([`mod@unit`]), by what ([`nvrtc`]), on which threads ([`pool`])
//! and how many at a time (`pace`), and how to get around it: what was compiled before ([`store`]), elsewhere ([`bundle`]),
//! or is being compiled by another process just now ([`images`]).
//!
//! An [`Artifact`] is the one compilation of one unit for one architecture, shared by everybody who wants it: those who
//! come while it runs wait for it, those who come later find it done, and if it fails all of them get the compiler's log.

pub mod architecture;
pub mod bundle;
pub mod codec;
mod exit;
#[cfg(feature = "host")]
pub mod host;
pub mod images;
pub mod key;
pub mod nvrtc;
mod pace;
pub mod pool;
pub mod progress;
pub mod store;
mod sys;
pub mod target;
pub mod unit;

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use architecture::Architecture;
pub use bundle::Bundle;
pub use images::{CompilerIdentity, Images};
pub use key::Key;
pub use nvrtc::{Image, ImageKind, Nvrtc, Program};
pub use pool::Pool;
pub use progress::{Progress, Step};
pub use target::Target;

use crate::error::{Code, Error, Result};
use crate::sync::{OfProcess, lock};

/// Something that turns a program into an image. Called from several threads at a time.
pub trait Compiler: Send + Sync {
    /// Compiles one program.
    ///
    /// # Errors
    /// No compiler, an architecture that it does not know, or a program that does not compile (with the compiler's log).
    fn compile(&self, program: &Program<'_>) -> Result<Image>;

    /// A name for where the compiler is looked for: the same name leads to the same compiler as long as nobody changes
    /// the installation. `None`: nobody can tell which compiler it is, so that what it makes is not stored.
    fn search(&self) -> Option<String> {
        None
    }

    /// Which compiler it is. May have to open it.
    ///
    /// # Errors
    /// There is none, or it does not tell.
    fn identify(&self) -> Result<CompilerIdentity> {
        Err(Error::precondition("this compiler does not tell its version"))
    }

    /// Which compiler it is, if it was opened already.
    fn identified(&self) -> Option<CompilerIdentity> {
        None
    }

    /// Whether a program could be compiled here at all. A compiler that may still turn up says yes.
    ///
    /// # Errors
    /// No compiler; the text says how to get one.
    fn available(&self) -> Result<()> {
        Ok(())
    }
}

/// NVRTC, found when the first program comes. That it was not found is not remembered: it may be installed later.
#[derive(Debug)]
pub struct NvrtcCompiler {
    explicit: Option<PathBuf>,
    library: OfProcess<Mutex<Option<Arc<Nvrtc>>>>,
}

impl NvrtcCompiler {
    /// A compiler that uses the library at `explicit`, or searches for one.
    #[must_use]
    pub fn new(explicit: Option<PathBuf>) -> Self {
        Self { explicit, library: OfProcess::default() }
    }

    /// The library.
    ///
    /// # Errors
    /// None was found; the text lists what was tried.
    pub fn library(&self) -> Result<Arc<Nvrtc>> {
        self.library.with(|library| {
            if let Some(found) = library {
                return Ok(Arc::clone(found));
            }
            let found = Arc::new(Nvrtc::find(self.explicit.as_deref())?);
            let (major, minor) = found.version();
            log::info!("oeq-native: NVRTC {major}.{minor} at {}", found.path().display());
            *library = Some(Arc::clone(&found));
            Ok(found)
        })
    }
}

impl Compiler for NvrtcCompiler {
    fn compile(&self, program: &Program<'_>) -> Result<Image> {
        self.library()?.compile(program)
    }

    fn search(&self) -> Option<String> {
        // What decides where the search leads, apart from what is installed. `PATH` is left out: it differs from job to
        // job, and is looked at last.
        let variables = ["LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "HOME"];
        let values = variables.map(|name| std::env::var_os(name).unwrap_or_default());
        Some(format!("{:?} {:?} {values:?}", self.explicit, std::env::current_exe().ok()))
    }

    fn identify(&self) -> Result<CompilerIdentity> {
        Ok(identity(&*self.library()?))
    }

    fn identified(&self) -> Option<CompilerIdentity> {
        // Not worth waiting for whoever is opening it.
        self.library.try_with(|library| library.as_deref().map(identity))?
    }
}

fn identity(library: &Nvrtc) -> CompilerIdentity {
    let (major, minor) = library.version();
    let number = |part| u16::try_from(part).unwrap_or_default();
    CompilerIdentity { version: (number(major), number(minor)), library: library.path().to_owned() }
}

/// How often somebody who waits for a compilation is told that it goes on.
const REMINDER: Duration = Duration::from_secs(10);

/// The work of an artifact. With `true` it may answer `None`, to be called again when there is nothing better to do.
type Work = Box<dyn FnMut(bool) -> Option<Result<Image>> + Send>;

/// Called when a wait has lasted for another [`REMINDER`].
type Reminder = Box<dyn Fn() + Send + Sync>;

/// One compilation: waiting, running or done.
pub struct Artifact {
    state: Mutex<State>,
    finished: Condvar,
    reminder: Option<Reminder>,
}

enum State {
    /// In the queue or being compiled, in the process of this id. `awaited`: somebody waits for it.
    Pending { ticket: Option<pool::Ticket>, process: u32, awaited: bool },
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
    pub fn start(pool: &Arc<Pool>, weight: u64, work: impl FnOnce() -> Result<Image> + Send + 'static) -> Arc<Self> {
        let mut work = Some(work);
        Self::begin(pool, weight, Box::new(move |_| Some(work.take()?())), None)
    }

    /// Starts a compilation on the pool that may step back once. `work` is called with `true`; if it answers `None`, it is
    /// called again with `false` after everything else that is queued. `reminder` is called now and then while somebody
    /// waits.
    pub fn start_in_turns(
        pool: &Arc<Pool>,
        weight: u64,
        work: impl FnMut(bool) -> Option<Result<Image>> + Send + 'static,
        reminder: impl Fn() + Send + Sync + 'static,
    ) -> Arc<Self> {
        Self::begin(pool, weight, Box::new(work), Some(Box::new(reminder)))
    }

    fn begin(pool: &Arc<Pool>, weight: u64, work: Work, reminder: Option<Reminder>) -> Arc<Self> {
        let state = State::Pending { ticket: None, process: std::process::id(), awaited: false };
        let artifact = Arc::new(Self { state: Mutex::new(state), finished: Condvar::new(), reminder });
        artifact.enqueue(pool, weight, work, true);
        artifact
    }

    fn enqueue(self: &Arc<Self>, pool: &Arc<Pool>, weight: u64, work: Work, first: bool) {
        let (own, weak) = (Arc::clone(self), Arc::downgrade(pool));
        match pool.submit(weight, Box::new(move || own.run(&weak, work, first))) {
            Ok(new) => {
                // The job may be done by now.
                if let State::Pending { ticket, awaited, .. } = &mut *lock(&self.state) {
                    *ticket = Some(new);
                    if *awaited {
                        pool.promote(new);
                    }
                }
            }
            Err(job) if first => *lock(&self.state) = State::Unstarted(job),
            // Whoever runs the first turn runs the second: nobody else would come for it.
            Err(job) => job(),
        }
    }

    fn run(self: &Arc<Self>, pool: &Weak<Pool>, mut work: Work, first: bool) {
        let pool = pool.upgrade().filter(|_| first);
        let turn = |work: &mut Work, may_step_back| {
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(may_step_back)))
                .unwrap_or_else(|_| Some(Err(Error::internal("the compilation panicked; this is a bug in oeq-native"))))
        };
        let outcome = match (turn(&mut work, pool.is_some()), pool) {
            // After everything that has a weight, in the order in which they stepped back.
            (None, Some(pool)) => return self.enqueue(&pool, 0, work, false),
            (outcome, _) => outcome,
        };
        self.finish(outcome.unwrap_or_else(|| Err(Error::internal("the compilation gave nothing"))).map(Arc::new));
    }

    /// An artifact that was there already.
    #[must_use]
    pub fn ready(image: Arc<Image>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State::Done(Ok(image))), finished: Condvar::new(), reminder: None })
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
            State::Pending { ticket, process, .. } => {
                let (ticket, process) = (*ticket, *process);
                *state = State::Pending { ticket, process, awaited: true };
                drop(state);
                if let Some(ticket) = ticket {
                    pool.promote(ticket);
                }
                state = lock(&self.state);
            }
            State::Unstarted(_) => {
                let pending = State::Pending { ticket: None, process: std::process::id(), awaited: true };
                if let State::Unstarted(job) = std::mem::replace(&mut *state, pending) {
                    drop(state);
                    job();
                    state = lock(&self.state);
                }
            }
            State::Done(_) => {}
        }
        let mut begin = Instant::now();
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
                    let waited = self.finished.wait_timeout(state, REMINDER).unwrap_or_else(PoisonError::into_inner);
                    state = waited.0;
                    if let Some(reminder) = self.reminder.as_ref().filter(|_| begin.elapsed() >= REMINDER) {
                        begin = Instant::now();
                        drop(state);
                        reminder();
                        state = lock(&self.state);
                    }
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
        let pool = Arc::new(Pool::new(2));
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
        let pool = Arc::new(Pool::new(1));
        let artifact = Artifact::start(&pool, 1, || panic!("injected"));
        assert_eq!(artifact.wait(&pool).unwrap_err().code(), Code::Internal);
        // The pool goes on.
        let next = Artifact::start(&pool, 1, || Ok(image(7)));
        assert_eq!(next.wait(&pool).unwrap().code, [7]);
    }

    #[test]
    fn without_a_thread_the_first_who_waits_does_the_work() {
        let own = Artifact::ready(Arc::new(image(0)));
        let job_target = Arc::clone(&own);
        *lock(&own.state) = State::Unstarted(Box::new(move || job_target.finish(Ok(Arc::new(image(9))))));
        assert!(own.peek().is_none() && !own.is_lost());
        assert_eq!(own.wait(&Pool::new(1)).unwrap().code, [9]);
    }

    #[test]
    fn what_a_fork_left_behind_is_lost_and_says_so() {
        let state = State::Pending { ticket: None, process: std::process::id().wrapping_add(1), awaited: false };
        let artifact = Artifact { state: Mutex::new(state), finished: Condvar::new(), reminder: None };
        assert!(artifact.is_lost());
        assert_eq!(artifact.wait(&Pool::new(1)).unwrap_err().code(), Code::Unavailable);
    }

    #[test]
    fn who_steps_back_comes_after_the_others_and_before_them_if_awaited() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let (open, gate) = std::sync::mpsc::channel::<()>();
        let (tell, begun) = std::sync::mpsc::channel::<()>();
        let pool = Arc::new(Pool::new(1));
        // Holds the only worker until all the others are queued.
        let first = Artifact::start(&pool, 9, move || {
            tell.send(()).map_err(|_| Error::internal("closed"))?;
            gate.recv().map_err(|_| Error::internal("closed"))?;
            Ok(image(0))
        });
        begun.recv().unwrap();
        let stepping = |name: &'static str| {
            let order = Arc::clone(&order);
            let work = move |may_step_back: bool| {
                lock(&order).push(format!("{name}{}", if may_step_back { " first" } else { " again" }));
                (!may_step_back).then(|| Ok(image(1)))
            };
            Artifact::start_in_turns(&pool, 5, work, || ())
        };
        let (one, two) = (stepping("one"), stepping("two"));
        let noted = Arc::clone(&order);
        let other = Artifact::start(&pool, 1, move || {
            lock(&noted).push("other".to_owned());
            Ok(image(2))
        });
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| two.wait(&pool).unwrap().code.clone());
            while !matches!(&*lock(&two.state), State::Pending { awaited: true, .. }) {
                std::thread::yield_now();
            }
            open.send(()).unwrap();
            assert_eq!(waiter.join().unwrap(), [1]);
        });
        // Only looked at: waiting would move them to the front.
        while [&first, &one, &other].iter().any(|artifact| artifact.peek().is_none()) {
            std::thread::yield_now();
        }
        // `two` is awaited: its second turn comes before what merely has a weight.
        assert_eq!(*lock(&order), ["two first", "two again", "one first", "other", "one again"]);
    }
}
