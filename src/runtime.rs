//! The runtime of a process: configuration, device backend, compiler, worker pool, records and counters.
//!
//! There is one, made at the first use. A program may put in its own before that, with another backend or other options.

use std::sync::{Arc, Mutex, OnceLock};

use crate::compile::bundle::Builder;
use crate::compile::progress::Listener;
use crate::compile::{Architecture, Bundle, Compiler, Images, NvrtcCompiler, Pool};
use crate::config::Config;
use crate::driver::Driver;
use crate::driver::cuda::Cuda;
use crate::error::{Error, Result};
use crate::kernel::{Interner, Payload, Record};
use crate::layout::Family;
use crate::stats::{Counters, Stats};
use crate::sync::lock;

/// Everything that call sites share.
pub struct Runtime {
    pub(crate) config: Config,
    pub(crate) driver: Box<dyn Driver>,
    pub(crate) images: Arc<Images>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) counters: Arc<Counters>,
    interner: Arc<Interner>,
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Runtime").field("config", &self.config).field("pool", &self.pool).finish_non_exhaustive()
    }
}

static GLOBAL: OnceLock<Result<Runtime>> = OnceLock::new();
/// That of the host platform, beside it.
#[cfg(feature = "host")]
static HOST: OnceLock<Result<Runtime>> = OnceLock::new();
/// Options that the program set before the runtime started; `None` once it has read them.
static OPTIONS: Mutex<Option<Vec<(String, String)>>> = Mutex::new(Some(Vec::new()));

/// What the program gave and the runtime has not taken yet.
static WAITING: Mutex<Waiting> = Mutex::new(Waiting { bundles: Vec::new(), asked: false, listener: None });

#[derive(Default)]
struct Waiting {
    bundles: Vec<Bundle>,
    /// Whether a listener, or none, was asked for.
    asked: bool,
    listener: Option<Listener>,
}

/// Uses a bundle in the process's runtime, for all platforms, now or as soon as it starts. This does not start it.
pub fn load_bundle(bundle: Bundle) {
    lock(&WAITING).bundles.push(bundle);
    if let Some(Ok(runtime)) = GLOBAL.get() {
        runtime.take_waiting();
    }
}

/// Tells a listener what happens to each unit in the process's runtime, see [`Runtime::set_progress`].
pub fn set_progress(listener: Option<Listener>) {
    // Always by this way, so that of two listeners the later one stays.
    let old = {
        let mut waiting = lock(&WAITING);
        waiting.asked = true;
        std::mem::replace(&mut waiting.listener, listener)
    };
    drop(old);
    if let Some(Ok(runtime)) = GLOBAL.get() {
        runtime.take_waiting();
    }
}

/// Sets one option of the process's runtime; it wins over the environment.
///
/// # Errors
/// The runtime has started, the key is unknown, or the value cannot be.
pub fn configure(key: &str, value: &str) -> Result<()> {
    Config::default().set(key, value)?;
    match (&mut *lock(&OPTIONS), GLOBAL.get()) {
        (Some(options), None) => options.push((key.to_owned(), value.to_owned())),
        _ => {
            return Err(Error::precondition(format!(
                "option `{key}` was set after the runtime had started; set options before the first model is compiled"
            )));
        }
    }
    Ok(())
}

impl Runtime {
    /// A runtime of the given parts.
    #[must_use]
    pub fn new(config: Config, driver: Box<dyn Driver>, compiler: Arc<dyn Compiler>) -> Self {
        let pool = Arc::new(Pool::new(config.compile_threads));
        let interner = Interner::new(config.keep_bytes, Arc::clone(&pool));
        let counters = Arc::<Counters>::default();
        let images = Arc::new(Images::new(&config, compiler, Arc::clone(&counters)));
        Self { config, driver, images, pool, counters, interner }
    }

    /// The process's runtime, on CUDA and NVRTC unless the program put in another.
    ///
    /// # Errors
    /// The configuration has a value that cannot be; every call says so.
    #[inline]
    pub fn global() -> Result<&'static Self> {
        match GLOBAL.get() {
            Some(Ok(runtime)) => Ok(runtime),
            _ => Self::start(),
        }
    }

    #[cold]
    fn start() -> Result<&'static Self> {
        let runtime = GLOBAL
            .get_or_init(|| {
                let options = lock(&OPTIONS).take().unwrap_or_default();
                let mut config = Config::from_environment()?;
                for (key, value) in options {
                    config.set(&key, &value)?;
                }
                let compiler = Arc::new(NvrtcCompiler::new(config.nvrtc.clone()));
                Ok(Self::new(config, Box::new(Cuda::default()), compiler))
            })
            .as_ref()
            .map_err(Clone::clone)?;
        // After it is there, so that what is given meanwhile is not left behind.
        runtime.take_waiting();
        Ok(runtime)
    }

    fn take_waiting(&self) {
        let mut waiting = lock(&WAITING);
        let Waiting { bundles, asked, listener } = std::mem::take(&mut *waiting);
        // Under the lock, in the order in which they were asked for; what the old one drops is dropped after it.
        let old = asked.then(|| self.images.set_listener(listener));
        drop(waiting);
        drop(old);
        for bundle in bundles {
            self.load_bundle(bundle);
        }
    }

    /// The process's runtime for the host platform: records, compiler and device of its own, and the options, compile
    /// threads, counters, bundles and listener of [`Runtime::global`], whenever they are given.
    ///
    /// # Errors
    /// See [`Runtime::global`].
    #[cfg(feature = "host")]
    #[inline]
    pub fn host() -> Result<&'static Self> {
        HOST.get_or_init(|| {
            let shared = Self::global()?;
            let config = shared.config.clone();
            let interner = Interner::new(config.keep_bytes, Arc::clone(&shared.pool));
            let compiler = Arc::new(crate::compile::host::HostCompiler::new(config.cxx.clone()));
            Ok(Self {
                driver: Box::new(crate::driver::host::Host::new(config.host_threads)),
                images: Arc::new(shared.images.beside(&config, compiler)),
                config,
                pool: Arc::clone(&shared.pool),
                counters: Arc::clone(&shared.counters),
                interner,
            })
        })
        .as_ref()
        .map_err(Clone::clone)
    }

    /// Makes `runtime` the process's.
    ///
    /// # Errors
    /// There is one already.
    pub fn install(runtime: Self) -> Result<&'static Self> {
        if GLOBAL.set(Ok(runtime)).is_err() {
            return Err(Error::precondition("the process has a runtime already; install another before its first use"));
        }
        let runtime = Self::global()?;
        runtime.take_waiting();
        Ok(runtime)
    }

    /// The record of a payload.
    ///
    /// # Errors
    /// The payload is not valid for the family.
    pub fn intern(&self, family: &'static Family, hash: i64, payload: Payload<'_>) -> Result<Arc<Record>> {
        self.interner.intern(family, hash, payload, self.config.compile_units, &self.counters)
    }

    /// Puts what a call needs to work for every architecture that the process sees. Where there is no driver nothing is
    /// known to compile for, and execute will say so.
    ///
    /// # Errors
    /// The record's family has no such derivative order.
    pub fn schedule(&self, record: &Arc<Record>, order: usize) -> Result<()> {
        record.call(order)?;
        let architectures = match self.driver.architectures() {
            Ok(architectures) => architectures,
            Err(error) => {
                log::debug!("oeq-native: nothing to compile for yet: {error}");
                return Ok(());
            }
        };
        let mut distinct: Vec<Architecture> = architectures.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        distinct.into_iter().try_for_each(|architecture| record.schedule(self, order, architecture))
    }

    /// Uses the compiled kernels of a bundle from now on, before the store and the compiler. In the process's runtime, on
    /// every platform.
    pub fn load_bundle(&self, bundle: Bundle) {
        self.images.add_bundle(Arc::new(bundle));
    }

    /// Every kernel that this runtime has compiled so far, or got from elsewhere, as a bundle's bytes; the process's runtime
    /// answers those of all platforms. Waits for what is being compiled.
    #[must_use]
    pub fn export_compiled(&self) -> Vec<u8> {
        let mut builder = Builder::default();
        self.add_compiled(&mut builder);
        #[cfg(feature = "host")]
        if let (Some(Ok(global)), Some(Ok(host))) = (GLOBAL.get(), HOST.get()) {
            if std::ptr::eq(self, global) {
                host.add_compiled(&mut builder);
            }
        }
        builder.build()
    }

    fn add_compiled(&self, builder: &mut Builder) {
        for record in self.interner.records() {
            for stored in record.compiled(self) {
                builder.add(stored);
            }
        }
    }

    /// Tells a listener what happens to each unit from now on, on every platform; `None` tells nobody. One listener at a
    /// time.
    pub fn set_progress(&self, listener: Option<Listener>) {
        drop(self.images.set_listener(listener));
    }

    /// The counters now.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    /// How many kernels there are, used by call sites or kept for later ones.
    #[must_use]
    pub fn kernels(&self) -> usize {
        self.interner.live()
    }

    /// The options in force.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }
}
