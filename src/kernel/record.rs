//! One kernel, shared by every call site that uses it: its plan, its compilations per architecture, its modules per device,
//! and the launchers that calls read.
//!
//! A launcher holds everything that a call of one derivative order needs on one device. Once made it is found without a
//! lock: one `arc-swap` load and an index. Making it takes locks, and may compile and load.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};
use smallvec::SmallVec;

use super::intern::{Identity, Interner};
use crate::compile::codec::Stored;
use crate::compile::images::{self, Images, Request};
use crate::compile::key::Digest;
use crate::compile::unit::{Cut, UnitIndex};
use crate::compile::{Architecture, Artifact, Image, Key, Step, Target, target};
use crate::config::CompileUnits;
use crate::driver::{Function, FunctionSpec, Module};
use crate::error::{Error, Result};
use crate::layout::{Call, Family};
use crate::payload::KernelPlan;
use crate::runtime::Runtime;
use crate::stats::bump;
use crate::sync::lock;

/// Derivative orders that a family may have: each has a launcher slot.
pub const MAX_ORDERS: usize = 3;

/// A unit loaded on a device.
struct LoadedUnit {
    module: Box<dyn Module>,
    /// Entry points in the order of the module's functions.
    entries: SmallVec<[&'static str; 2]>,
}

impl std::fmt::Debug for LoadedUnit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LoadedUnit({:?})", self.entries)
    }
}

/// What a call of one derivative order needs on one device.
#[derive(Debug)]
pub struct Launcher {
    /// The functions of the call's launches, each followed by its fix-up where the payload is deterministic.
    pub functions: SmallVec<[Function; 4]>,
    /// Keeps the functions above loaded.
    _units: SmallVec<[Arc<LoadedUnit>; 2]>,
}

type Slot = Arc<Mutex<Option<Arc<LoadedUnit>>>>;
type ByOrdinal = Vec<Option<Arc<Launcher>>>;

/// One kernel.
#[derive(Debug)]
pub struct Record {
    family: &'static Family,
    identity: Identity,
    /// Of the identity, made by the first worker that needs it.
    digest: OnceLock<Digest>,
    plan: KernelPlan,
    cut: Cut,
    artifacts: Mutex<Vec<(Architecture, UnitIndex, Arc<Artifact>)>>,
    /// Which version of the compiler the images came from.
    compilers: Mutex<Vec<(Key, (u16, u16))>>,
    modules: Mutex<Vec<(u32, UnitIndex, Slot)>>,
    launchers: [ArcSwap<ByOrdinal>; MAX_ORDERS],
    /// Call sites that use it.
    uses: AtomicUsize,
    /// Of the images that were compiled.
    image_bytes: AtomicU64,
    pinned: AtomicBool,
    home: Weak<Interner>,
}

impl Record {
    pub(super) fn new(
        family: &'static Family,
        identity: Identity,
        plan: KernelPlan,
        policy: CompileUnits,
        home: Weak<Interner>,
    ) -> Self {
        let cut = Cut::of(family, &plan, policy);
        Self {
            family,
            identity,
            digest: OnceLock::new(),
            plan,
            cut,
            artifacts: Mutex::default(),
            compilers: Mutex::default(),
            modules: Mutex::default(),
            launchers: std::array::from_fn(|_| ArcSwap::from_pointee(Vec::new())),
            uses: AtomicUsize::new(0),
            image_bytes: AtomicU64::new(0),
            pinned: AtomicBool::new(false),
            home,
        }
    }

    /// A call site begins to use the record.
    pub(super) fn acquire(&self) {
        if self.uses.fetch_add(1, Ordering::AcqRel) == 0 {
            if let Some(home) = self.home.upgrade() {
                home.used(self);
            }
        }
    }

    /// A call site is gone.
    pub(super) fn release(self: &Arc<Self>) {
        if self.uses.fetch_sub(1, Ordering::AcqRel) == 1 {
            if let Some(home) = self.home.upgrade() {
                home.unused(self);
            }
        }
    }

    /// Bytes that it holds: the payload, its source and the images.
    pub(super) fn bytes(&self) -> u64 {
        let text = self.identity.bytes() + self.plan.source.len();
        text as u64 + self.image_bytes.load(Ordering::Relaxed)
    }

    /// Whether [`Self::pin`] was called.
    #[inline]
    pub fn is_pinned(&self) -> bool {
        self.pinned.load(Ordering::Relaxed)
    }

    /// Keeps the record, and so its loaded functions, as long as the process: somebody who never says when it is done with
    /// them holds them in a graph.
    #[cold]
    pub fn pin(self: &Arc<Self>) {
        if !self.pinned.swap(true, Ordering::Relaxed) {
            if let Some(home) = self.home.upgrade() {
                home.pin(self);
            }
        }
    }

    /// The kernel's family.
    #[must_use]
    pub fn family(&self) -> &'static Family {
        self.family
    }

    /// What it is equal by.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The validated payload.
    #[must_use]
    pub fn plan(&self) -> &KernelPlan {
        &self.plan
    }

    /// How it is cut for the compiler.
    #[must_use]
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// The family's call of a derivative order.
    ///
    /// # Errors
    /// The family has no such order.
    pub fn call(&self, order: usize) -> Result<&'static Call> {
        self.family.calls.get(order).filter(|_| order < MAX_ORDERS).ok_or_else(|| {
            let orders: Vec<String> = (0..self.family.calls.len()).map(|order| order.to_string()).collect();
            Error::invalid(format!(
                "derivative is {order}; the family `{}` has {}",
                self.family.name,
                orders.join(", ")
            ))
        })
    }

    fn units_of(&self, call: &Call) -> SmallVec<[UnitIndex; 2]> {
        call.launches.iter().map(|launch| self.cut.unit_of(launch, &self.plan)).collect()
    }

    /// Makes sure that what a call needs is being compiled for an architecture. What failed before is tried again.
    ///
    /// # Errors
    /// The family has no such derivative order.
    pub fn schedule(self: &Arc<Self>, runtime: &Runtime, order: usize, architecture: Architecture) -> Result<()> {
        for unit in self.units_of(self.call(order)?) {
            self.artifact(runtime, unit, architecture, true);
        }
        Ok(())
    }

    fn artifact(
        self: &Arc<Self>,
        runtime: &Runtime,
        unit: UnitIndex,
        architecture: Architecture,
        retry: bool,
    ) -> Arc<Artifact> {
        let mut artifacts = lock(&self.artifacts);
        let known = artifacts.iter_mut().find(|(a, u, _)| (*a, *u) == (architecture, unit));
        if let Some((_, _, artifact)) = &known {
            if !(retry && artifact.is_lost()) {
                return Arc::clone(artifact);
            }
        }
        let weight = self.plan.source.len() as u64 * u64::from(self.cut.units[unit].cost);
        let target = target::choose(&runtime.config.arch, architecture);
        let (record, images) = (Arc::clone(self), Arc::clone(&runtime.images));
        let (queued, label) = (Instant::now(), images::label(self.family.name, &self.entry_points(unit), target));
        images.queued(&label, queued);
        let (waiting, name) = (Arc::clone(&images), label.clone());
        let artifact = Artifact::start_in_turns(
            &runtime.pool,
            weight,
            move |may_defer| record.obtain(&images, unit, target, &label, queued, may_defer),
            move || waiting.tell(&name, queued, Step::Awaited),
        );
        match known {
            Some(entry) => entry.2 = Arc::clone(&artifact),
            None => artifacts.push((architecture, unit, Arc::clone(&artifact))),
        }
        artifact
    }

    fn entry_points(&self, unit: UnitIndex) -> SmallVec<[&'static str; 8]> {
        self.cut.units[unit].entries.iter().map(|entry| entry.name).collect()
    }

    fn key(&self, unit: UnitIndex, target: Target) -> Key {
        let digest = self.digest.get_or_init(|| self.identity.digest());
        Key::new(self.family.name, digest, &self.entry_points(unit), target)
    }

    fn obtain(
        self: &Arc<Self>,
        images: &Images,
        unit: UnitIndex,
        target: Target,
        label: &str,
        queued: Instant,
        may_defer: bool,
    ) -> Option<Result<Image>> {
        let request = Request {
            key: self.key(unit, target),
            family: self.family.name,
            target,
            entry_points: &self.entry_points(unit),
            text: &|| self.cut.text(&self.cut.units[unit], &self.plan),
            label,
            queued,
        };
        let outcome = images.obtain(&request, may_defer)?;
        Some(outcome.map(|stored| {
            lock(&self.compilers).push((stored.key, stored.compiler));
            self.image_bytes.fetch_add(stored.image.code.len() as u64, Ordering::Relaxed);
            // Nobody may have waited for it. What is kept is measured anew, so that what comes late counts, too.
            if self.uses.load(Ordering::Acquire) == 0 {
                if let Some(home) = self.home.upgrade() {
                    home.unused(self);
                }
            }
            stored.image
        }))
    }

    /// Everything of this kernel that was compiled, ready to be passed on. Waits for what is being compiled, and leaves out
    /// what failed.
    pub fn compiled(&self, runtime: &Runtime) -> Vec<Stored> {
        let artifacts = lock(&self.artifacts).clone();
        let stored = artifacts.into_iter().filter_map(|(architecture, unit, artifact)| {
            let image = artifact.wait(&runtime.pool).ok()?;
            let target = target::choose(&runtime.config.arch, architecture);
            let key = self.key(unit, target);
            let compiler = lock(&self.compilers).iter().rev().find(|(of, _)| *of == key)?.1;
            let family = self.family.name.to_owned();
            Some(Stored { key, family, target: target.to_string(), compiler, image: Image::clone(&image) })
        });
        stored.collect()
    }

    /// The launcher of a call on a device, if it was made. Takes no lock.
    #[inline]
    pub fn launcher(&self, order: usize, ordinal: u32) -> Option<Ready> {
        let guard = self.launchers.get(order)?.load();
        matches!(guard.get(ordinal as usize), Some(Some(_))).then_some(Ready { guard, ordinal })
    }

    /// Makes the launcher of a call on a device. With `wait`, waits for the compiler; without, answers `false` when
    /// something is not compiled yet.
    ///
    /// # Errors
    /// No driver or no such device; the compilation failed; the image does not load there.
    pub fn prepare(self: &Arc<Self>, runtime: &Runtime, order: usize, ordinal: u32, wait: bool) -> Result<bool> {
        let call = self.call(order)?;
        let architectures = runtime.driver.architectures()?;
        let architecture = *architectures.get(ordinal as usize).ok_or_else(|| {
            Error::invalid(format!(
                "device ordinal {ordinal} does not exist; this process sees {}",
                architectures.len()
            ))
        })?;
        let indices = self.units_of(call);
        // All of them are put to work before the first is waited for.
        let artifacts: SmallVec<[Arc<Artifact>; 2]> =
            indices.iter().map(|unit| self.artifact(runtime, *unit, architecture, false)).collect();
        let mut units: SmallVec<[Arc<LoadedUnit>; 2]> = SmallVec::new();
        for (index, artifact) in indices.iter().zip(&artifacts) {
            let image = match artifact.peek() {
                Some(outcome) => outcome?,
                None if wait => artifact.wait(&runtime.pool)?,
                None => return Ok(false),
            };
            units.push(self.load(runtime, *index, ordinal, &image)?);
        }
        let mut functions = SmallVec::new();
        for (launch, unit) in call.launches.iter().zip(&units) {
            let find = |entry: &str| {
                let index = unit.entries.iter().position(|name| *name == entry);
                index.and_then(|index| unit.module.function(index)).ok_or_else(|| {
                    Error::internal(format!("entry point `{entry}` is not in the unit that was loaded for it"))
                })
            };
            functions.push(find(launch.entry)?);
            if let Some(fixup) = launch.fixup.as_ref().filter(|_| self.plan.deterministic) {
                functions.push(find(fixup.entry)?);
            }
        }
        let launcher = Arc::new(Launcher { functions, _units: units });
        self.launchers[order].rcu(|current| {
            let mut next = ByOrdinal::clone(current);
            if next.len() <= ordinal as usize {
                next.resize(ordinal as usize + 1, None);
            }
            next[ordinal as usize].get_or_insert_with(|| Arc::clone(&launcher));
            next
        });
        Ok(true)
    }

    fn load(&self, runtime: &Runtime, unit: UnitIndex, ordinal: u32, image: &Image) -> Result<Arc<LoadedUnit>> {
        let slot = {
            let mut modules = lock(&self.modules);
            if let Some((_, _, slot)) = modules.iter().find(|(o, u, _)| (*o, *u) == (ordinal, unit)) {
                Arc::clone(slot)
            } else {
                let slot = Slot::default();
                modules.push((ordinal, unit, Arc::clone(&slot)));
                slot
            }
        };
        // Devices load side by side; two threads that want the same unit on one device load it once.
        let mut slot = lock(&slot);
        if let Some(loaded) = &*slot {
            return Ok(Arc::clone(loaded));
        }
        let entries = &self.cut.units[unit].entries;
        let specs = entries
            .iter()
            .map(|entry| {
                let symbol = image.symbols.iter().find(|(name, _)| name == entry.name).ok_or_else(|| {
                    Error::internal(format!("the compiled image does not name entry point `{}`", entry.name))
                })?;
                Ok(FunctionSpec { entry: entry.name, symbol: &symbol.1, shared_bytes: entry.shared_bytes })
            })
            .collect::<Result<SmallVec<[FunctionSpec<'_>; 8]>>>()?;
        let module = runtime.driver.load(ordinal, image, &specs)?;
        bump(&runtime.counters.loaded);
        let loaded = Arc::new(LoadedUnit { module, entries: entries.iter().map(|entry| entry.name).collect() });
        *slot = Some(Arc::clone(&loaded));
        Ok(loaded)
    }
}

/// A launcher that is there: holds it for the length of a call without counting.
pub struct Ready {
    guard: Guard<Arc<ByOrdinal>>,
    ordinal: u32,
}

impl Ready {
    /// The launcher.
    #[inline]
    #[must_use]
    pub fn get(&self) -> Option<&Launcher> {
        self.guard.get(self.ordinal as usize)?.as_deref()
    }
}

impl std::fmt::Debug for Ready {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ready({})", self.ordinal)
    }
}
