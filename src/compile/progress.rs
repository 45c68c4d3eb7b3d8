//! Telling whoever asks how compilation goes: one event for each step of each unit.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;

/// A step in the life of a unit. The numbers are part of the C ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Step {
    /// It waits for a thread.
    Queued = 0,
    /// The compiler has it.
    Compiling = 1,
    /// Another process compiles it, and this one waits.
    Elsewhere = 2,
    /// The compiler is done with it.
    Compiled = 3,
    /// It was in the store.
    FromStore = 4,
    /// It was in a bundle.
    FromBundle = 5,
    /// It could not be had.
    Failed = 6,
    /// A call waits for it, and has waited for some time.
    Awaited = 7,
}

impl Step {
    /// Whether nothing follows.
    #[must_use]
    pub const fn is_last(self) -> bool {
        matches!(self, Self::Compiled | Self::FromStore | Self::FromBundle | Self::Failed)
    }

    /// The step in words, to go between a unit's name and a time.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Compiling => "compiling",
            Self::Elsewhere => "waiting for another process that compiles it",
            Self::Compiled => "compiled",
            Self::FromStore => "from the store",
            Self::FromBundle => "from a bundle",
            Self::Failed => "failed",
            Self::Awaited => "still awaited",
        }
    }
}

/// One event.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// The unit: family, entry points and target, for example `convolution/backward+fixup_backward for sm_90`.
    pub unit: &'a str,
    /// What happened to it.
    pub step: Step,
    /// Since it was queued.
    pub elapsed: Duration,
    /// Units queued in this runtime so far, on all its platforms, and those of them that are done.
    pub total: u64,
    /// See `total`.
    pub done: u64,
}

/// Who is told. Called from compile threads, several at a time, and from the threads on which XLA calls; it must be quick
/// and must not call into this library. Calls that have begun may still run when another has taken its place.
pub type Listener = Arc<dyn Fn(&Progress<'_>) + Send + Sync>;

/// The listener, if there is one.
#[derive(Default)]
pub(crate) struct Bell(ArcSwapOption<Box<Listener>>);

impl fmt::Debug for Bell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bell({})", if self.0.load().is_some() { "heard" } else { "unheard" })
    }
}

impl Bell {
    pub(crate) fn set(&self, listener: Option<Listener>) -> Option<Listener> {
        let old = self.0.swap(listener.map(|listener| Arc::new(Box::new(listener))));
        old.map(|old| Listener::clone(&old))
    }

    /// Tells the listener and the log. A listener that panics has missed an event, nothing more.
    pub(crate) fn ring(&self, event: &Progress<'_>) {
        let Progress { unit, step, elapsed, total, done } = event;
        let seconds = elapsed.as_secs_f64();
        match step {
            Step::Queued => log::debug!("oeq-native: {unit}: queued"),
            Step::Failed => log::warn!("oeq-native: {unit}: failed after {seconds:.2} s ({done} of {total} done)"),
            _ => log::info!("oeq-native: {unit}: {} {seconds:.2} s ({done} of {total} done)", step.words()),
        }
        if let Some(listener) = &*self.0.load() {
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| listener(event)));
            if let Err(panic) = told {
                // What was thrown may throw again.
                std::mem::forget(panic);
                log::warn!("oeq-native: the progress callback panicked");
            }
        }
    }
}
