//! Where a unit's image comes from: a bundle, the store, another process that is just making it, or the compiler.
//!
//! Everything here runs on the pool's workers. The calls that XLA waits for never touch a disk.
//!
//! The compiler's version is part of what an image is stored under, and asking NVRTC for its version means opening it. So
//! the store remembers which library a search led to. If that file is unchanged, its version is wanted; if nothing is
//! remembered, NVRTC is opened to ask; and where there is none, whatever version made the stored image will do.

use std::borrow::Cow;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use super::bundle::{self, Bundle};
use super::codec::Stored;
use super::key::Key;
use super::progress::{Bell, Listener, Progress, Step};
use super::store::{Hold, Locked, Store, Wanted};
use super::target::Target;
use super::{Compiler, Program};
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::stats::{Counters, bump};

/// A unit that is wanted.
pub struct Request<'a> {
    /// What it is known by.
    pub key: Key,
    /// The payload's family.
    pub family: &'static str,
    /// What to compile for.
    pub target: Target,
    /// The unit's entry points.
    pub entry_points: &'a [&'a str],
    /// The program text; asked for only when it has to be compiled.
    pub text: &'a dyn Fn() -> Cow<'a, str>,
    /// See [`label`].
    pub label: &'a str,
    /// When it was queued.
    pub queued: Instant,
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Request({}, {})", self.label, self.key)
    }
}

/// A unit in words, for people.
#[must_use]
pub fn label(family: &str, entry_points: &[&str], target: Target) -> String {
    format!("{family}/{} for {target}", entry_points.join("+"))
}

/// The ways to an image, in their order.
pub struct Images {
    compiler: Arc<dyn Compiler>,
    store: Option<Store>,
    wanted: OnceLock<Wanted>,
    shared: Arc<Shared>,
}

/// What the platforms of one runtime share: a program that gives a bundle or a listener means all of them.
struct Shared {
    /// The bundles of the configuration, as paths.
    list: Option<String>,
    /// The same, opened by the first worker.
    listed: OnceLock<Result<Vec<Arc<Bundle>>>>,
    /// Added by the program.
    added: RwLock<Vec<Arc<Bundle>>>,
    counters: Arc<Counters>,
    bell: Bell,
    total: AtomicU64,
    done: AtomicU64,
}

impl fmt::Debug for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Images").field("store", &self.store).field("bundles", &self.shared.list).finish_non_exhaustive()
    }
}

impl Images {
    /// The ways that the configuration names. Touches no disk.
    #[must_use]
    pub fn new(config: &Config, compiler: Arc<dyn Compiler>, counters: Arc<Counters>) -> Self {
        let store = Self::store_of(config, &compiler, &counters);
        Self::with(store, config.bundle.clone(), compiler, counters)
    }

    /// The ways for another platform of the same runtime: with a compiler and a store of its own, and with these bundles,
    /// this listener and these counters, whenever they are given.
    #[must_use]
    pub fn beside(&self, config: &Config, compiler: Arc<dyn Compiler>) -> Self {
        let store = Self::store_of(config, &compiler, &self.shared.counters);
        Self { compiler, store, wanted: OnceLock::new(), shared: Arc::clone(&self.shared) }
    }

    fn store_of(config: &Config, compiler: &Arc<dyn Compiler>, counters: &Arc<Counters>) -> Option<Store> {
        match (config.store, config.store_directory()) {
            // A compiler that does not say which one it is makes nothing that another process could take for its own.
            _ if compiler.search().is_none() => None,
            (false, _) => None,
            (true, Some(directory)) => Some(Store::new(&directory, config.store_bytes, Arc::clone(counters))),
            (true, None) => {
                log::warn!(
                    "oeq-native: the user has no cache directory; compiled kernels are kept in memory only (OEQ_STORE_DIR \
                     names a directory)"
                );
                None
            }
        }
    }

    /// The ways that are given. `bundles` is a list of paths with colons between them.
    #[must_use]
    pub fn with(
        store: Option<Store>,
        bundles: Option<String>,
        compiler: Arc<dyn Compiler>,
        counters: Arc<Counters>,
    ) -> Self {
        let shared = Shared {
            list: bundles,
            listed: OnceLock::new(),
            added: RwLock::default(),
            counters,
            bell: Bell::default(),
            total: AtomicU64::new(0),
            done: AtomicU64::new(0),
        };
        Self { compiler, store, wanted: OnceLock::new(), shared: Arc::new(shared) }
    }

    /// The store, if there is one.
    #[must_use]
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Whether what is neither in the store nor in a bundle could be compiled.
    ///
    /// # Errors
    /// See [`Compiler::available`].
    pub fn compiler_available(&self) -> Result<()> {
        self.compiler.available()
    }

    /// Uses a bundle from now on, after those that came before.
    pub fn add_bundle(&self, bundle: Arc<Bundle>) {
        self.shared.added.write().unwrap_or_else(PoisonError::into_inner).push(bundle);
    }

    /// Tells this listener and no other, or nobody. Answers the one before.
    pub fn set_listener(&self, listener: Option<Listener>) -> Option<Listener> {
        self.shared.bell.set(listener)
    }

    /// Says that a unit waits for a thread.
    pub fn queued(&self, label: &str, queued: Instant) {
        self.shared.total.fetch_add(1, Ordering::Relaxed);
        self.tell(label, queued, Step::Queued);
    }

    /// Says what happens to a unit.
    pub fn tell(&self, label: &str, queued: Instant, step: Step) {
        if step.is_last() {
            self.shared.done.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.bell.ring(&Progress {
            unit: label,
            step,
            elapsed: queued.elapsed(),
            total: self.shared.total.load(Ordering::Relaxed),
            done: self.shared.done.load(Ordering::Relaxed),
        });
    }

    /// The image of a unit. `None` if another process is making it and the caller may do something else meanwhile
    /// (`may_defer`); then ask again.
    pub fn obtain(&self, request: &Request<'_>, may_defer: bool) -> Option<Result<Stored>> {
        let (outcome, step) = match self.find_or_make(request, may_defer) {
            Ok(None) => return None,
            Ok(Some((stored, step))) => (Ok(stored), step),
            Err(error) => {
                bump(&self.shared.counters.failed);
                (Err(error), Step::Failed)
            }
        };
        self.tell(request.label, request.queued, step);
        Some(outcome)
    }

    fn find_or_make(&self, request: &Request<'_>, may_defer: bool) -> Result<Option<(Stored, Step)>> {
        if let Some(stored) = self.bundled(&request.key)? {
            bump(&self.shared.counters.bundle_hits);
            return Ok(Some((stored, Step::FromBundle)));
        }
        let Some((store, search)) = self.store.as_ref().zip(self.compiler.search()) else {
            return self.make(request, (0, 0)).map(|stored| Some((stored, Step::Compiled)));
        };
        let wanted = self.wanted(store, &search);
        if let Some(stored) = self.stored(store, &request.key, wanted) {
            return Ok(Some(stored));
        }
        if may_defer {
            // Asked for the second time, it would be counted twice.
            bump(&self.shared.counters.store_misses);
        }
        let compiler = self.compiler.identify().map_err(|error| self.without_compiler(error))?;
        store.remember_compiler(&search, compiler.version, &compiler.library);
        if wanted != Wanted::Exactly(compiler.version) {
            // The search led elsewhere this time.
            if let Some(stored) = self.stored(store, &request.key, Wanted::Exactly(compiler.version)) {
                return Ok(Some(stored));
            }
        }
        let mut hold: Option<Hold> = match store.lock(&request.key, compiler.version, false) {
            Locked::Held(hold) => Some(hold),
            Locked::Without => None,
            Locked::Busy if may_defer => return Ok(None),
            Locked::Busy => {
                bump(&self.shared.counters.store_waits);
                self.tell(request.label, request.queued, Step::Elsewhere);
                match store.lock(&request.key, compiler.version, true) {
                    Locked::Held(hold) => Some(hold),
                    Locked::Busy | Locked::Without => None,
                }
            }
        };
        // Between the look and the lock another process may have finished.
        if let Some(stored) = self.stored(store, &request.key, Wanted::Exactly(compiler.version)) {
            return Ok(Some(stored));
        }
        let made = self.make(request, compiler.version);
        let kept = made.as_ref().is_ok_and(|stored| store.put(stored));
        // A process that ends breaks off its compilation: that says nothing about the others' chances.
        let ended = made.as_ref().is_err_and(|error| error.code() == Code::Unavailable);
        if let Some(hold) = hold.as_mut().filter(|_| !kept && !ended) {
            hold.give_up();
        }
        made.map(|stored| Some((stored, Step::Compiled)))
    }

    fn bundled(&self, key: &Key) -> Result<Option<Stored>> {
        if let Some(list) = &self.shared.list {
            if self.shared.listed.get().is_none() {
                // Two workers may both open them; the one who is second drops its own.
                let bundles = bundle::open_list(list).map(|bundles| bundles.into_iter().map(Arc::new).collect());
                let _ =
                    self.shared.listed.set(bundles.map_err(|error| error.context("environment variable OEQ_BUNDLE")));
            }
        }
        let listed: &[Arc<Bundle>] = match self.shared.listed.get() {
            Some(Ok(bundles)) => bundles,
            Some(Err(error)) => return Err(error.clone()),
            None => &[],
        };
        let added = self.shared.added.read().unwrap_or_else(PoisonError::into_inner).clone();
        for bundle in listed.iter().chain(&added) {
            match bundle.find(key) {
                Ok(Some(stored)) => return Ok(Some(stored)),
                Ok(None) => {}
                Err(error) => log::warn!("oeq-native: {error}; the unit is looked for elsewhere"),
            }
        }
        Ok(None)
    }

    fn wanted(&self, store: &Store, search: &str) -> Wanted {
        if let Some(opened) = self.compiler.identified() {
            return Wanted::Exactly(opened.version);
        }
        if let Some(known) = self.wanted.get() {
            return *known;
        }
        let wanted = match store.remembered_compiler(search) {
            Some(version) => Wanted::Exactly(version),
            None => match self.compiler.identify() {
                Ok(compiler) => {
                    store.remember_compiler(search, compiler.version, &compiler.library);
                    Wanted::Exactly(compiler.version)
                }
                Err(error) => {
                    log::debug!("oeq-native: stored images of any compiler will do: {error}");
                    Wanted::Any
                }
            },
        };
        *self.wanted.get_or_init(|| wanted)
    }

    fn stored(&self, store: &Store, key: &Key, wanted: Wanted) -> Option<(Stored, Step)> {
        let stored = store.find(key, wanted)?;
        bump(&self.shared.counters.store_hits);
        Some((stored, Step::FromStore))
    }

    fn make(&self, request: &Request<'_>, version: (u16, u16)) -> Result<Stored> {
        self.tell(request.label, request.queued, Step::Compiling);
        let text = (request.text)();
        let name = format!("oeq_{}_{}.cu", request.family, request.entry_points.first().unwrap_or(&"kernel"));
        let image = self
            .compiler
            .compile(&Program {
                name: &name,
                source: &text,
                architecture: request.target.base,
                entry_points: request.entry_points,
                extra_options: &request.target.options(),
            })
            .map_err(|error| self.without_compiler(error))?;
        bump(&self.shared.counters.compiled);
        let (family, target) = (request.family.to_owned(), request.target.to_string());
        Ok(Stored { key: request.key, family, target, compiler: version, image })
    }

    /// The error that there is no compiler, with why one was needed.
    fn without_compiler(&self, error: Error) -> Error {
        let bundles: Vec<String> =
            self.shared.listed.get().into_iter().flatten().flatten().map(|b| b.name().to_owned()).collect();
        let added = self.shared.added.read().unwrap_or_else(PoisonError::into_inner);
        let names = [bundles, added.iter().map(|bundle| bundle.name().to_owned()).collect()].concat();
        if error.code() != Code::FailedPrecondition || names.is_empty() {
            return error;
        }
        error.context(format_args!("this unit is not in the bundles that were given ({})", names.join(", ")))
    }
}

/// Which compiler it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompilerIdentity {
    /// Major and minor version.
    pub version: (u16, u16),
    /// The library's file.
    pub library: PathBuf,
}
