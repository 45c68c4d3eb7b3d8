//! The host backend: an image is a shared library, a launch runs the grid on the caller and a bounded set of threads, and
//! returns when it is done. There are no streams; in a stream's place the caller may name threads that are lent to the call
//! ([`Threads`]). Without them the device has a team of its own.
//!
//! The caller always works, and never waits for a thread that has not come: lent threads may be busy, may be the caller
//! itself, may come when everything is over. What they are given is therefore a counted reference to the `Grid`: who
//! comes late finds it closed, and looks at nothing else.
//!
//! A block is run by the image's own code (`kernels/host/oeq_host.h`), in memory that this side provides: a region with
//! the stacks of a warp's lanes, and the block's shared memory. Each thread that works on a grid has a `Place` of both.
//! Each begins with blocks that lie together, and then takes what others have left of theirs, one by one, so that threads
//! which are late or slow hold nobody up.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use smallvec::SmallVec;

use super::{Driver, Function, FunctionSpec, Module, Stream, Work};
use crate::compile::host::{PrivateFolder, REGION, STACK, STACKS};
use crate::compile::{Architecture, Image, Pool};
use crate::error::{Code, Error, Result};
use crate::sync::lock;

/// Lanes of a warp, each with a stack.
const LANES: usize = 32;

/// The most shared memory of a block, bytes: far above what any GPU has.
const MAX_SHARED: u32 = 16 << 20;

/// Runs one block: region, parameters, block, blocks, threads, shared memory.
type RunBlock = unsafe extern "C" fn(*mut c_void, *const *mut c_void, u32, u32, u32, *mut c_void);

/// What a lent thread runs.
pub type Task = unsafe extern "C" fn(*mut c_void);

/// Somebody who lends threads to a call.
pub trait Lender {
    /// How many threads there are to lend.
    fn threads(&self) -> usize;

    /// Has a thread run a task with `data`, once: sooner or later, maybe at once and on the calling thread.
    ///
    /// # Errors
    /// The task was not taken and will not run.
    ///
    /// # Safety
    /// `task` may be called with `data` once, from any thread, at any time from now on.
    unsafe fn lend(&self, task: Task, data: *mut c_void) -> Result<()>;
}

/// Threads that are lent to a call: what stands in a stream's place on the host.
pub struct Threads<'a>(pub &'a dyn Lender);

impl std::fmt::Debug for Threads<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Threads({})", self.0.threads())
    }
}

impl Threads<'_> {
    /// What [`Driver::enqueue`] takes for a stream. This value must live through that call.
    #[must_use]
    pub fn as_stream(&self) -> Stream {
        Stream(ptr::from_ref(self).cast_mut().cast())
    }
}

/// The host CPU as a device.
#[derive(Debug)]
pub struct Host {
    team: Pool,
    /// Threads that work on one grid, the caller included.
    threads: usize,
    places: Arc<Mutex<Vec<Place>>>,
}

impl Host {
    /// A device that works on a grid with at most `threads` threads, the caller's own included.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self { team: Pool::new(threads.saturating_sub(1)), threads: threads.max(1), places: Arc::default() }
    }
}

/// Memory to run blocks in.
#[derive(Debug)]
struct Place {
    region: *mut c_void,
    shared: *mut u8,
    shared_layout: Layout,
}

// SAFETY: a place owns its memory, which is tied to no thread.
unsafe impl Send for Place {}

const SHARED_ALIGN: usize = 256;

impl Place {
    fn new() -> Result<Self> {
        let refused = || {
            let error = std::io::Error::last_os_error();
            Error::new(Code::ResourceExhausted, format!("no memory for the stacks of a warp ({REGION} bytes): {error}"))
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping of twice the size holds an aligned region; what lies before and after it goes back. All
        // addresses below stay inside the mapping.
        let region = unsafe {
            let raw = libc::mmap(ptr::null_mut(), 2 * REGION, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            if raw == libc::MAP_FAILED {
                return Err(refused());
            }
            let before = raw.cast::<u8>().align_offset(REGION);
            let region = raw.cast::<u8>().add(before);
            if before > 0 {
                libc::munmap(raw, before);
            }
            libc::munmap(region.add(REGION).cast(), REGION - before);
            region
        };
        let shared_layout = Layout::from_size_align(0, SHARED_ALIGN).unwrap_or(Layout::new::<u8>());
        let place = Self { region: region.cast(), shared: ptr::null_mut(), shared_layout };
        for lane in 0..LANES {
            // SAFETY: the lowest page of each stack, inside the region.
            let status = unsafe { libc::mprotect(region.add(STACKS + lane * STACK).cast(), page(), libc::PROT_NONE) };
            if status != 0 {
                return Err(refused());
            }
        }
        Ok(place)
    }

    /// Shared memory of at least that size.
    fn shared(&mut self, bytes: u32) -> Result<*mut c_void> {
        let bytes = bytes as usize;
        if bytes > self.shared_layout.size() {
            let refused =
                || Error::new(Code::ResourceExhausted, format!("no memory for {bytes} bytes of shared memory"));
            let layout = Layout::from_size_align(bytes, SHARED_ALIGN).map_err(|_| refused())?;
            self.free_shared();
            // SAFETY: the layout is not empty.
            let shared = unsafe { alloc_zeroed(layout) };
            if shared.is_null() {
                return Err(refused());
            }
            self.shared = shared;
            self.shared_layout = layout;
        }
        Ok(self.shared.cast())
    }

    fn free_shared(&mut self) {
        if !self.shared.is_null() {
            // SAFETY: allocated with this layout.
            unsafe { dealloc(self.shared, self.shared_layout) };
            self.shared = ptr::null_mut();
            self.shared_layout = Layout::from_size_align(0, SHARED_ALIGN).unwrap_or(Layout::new::<u8>());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.free_shared();
        // SAFETY: the region was mapped in `new` and nothing runs in it.
        unsafe { libc::munmap(self.region, REGION) };
    }
}

fn page() -> usize {
    // SAFETY: asks for a number.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// One launch, shared by the threads that work on it.
struct Grid {
    run: RunBlock,
    parameters: *const *mut c_void,
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
    /// For each share of the grid, a run of blocks, the next one in it.
    next: SmallVec<[AtomicU32; 16]>,
    /// Threads that have come so far.
    came: AtomicUsize,
    places: Arc<Mutex<Vec<Place>>>,
    team: Mutex<Team>,
    left: Condvar,
}

fn first_of(share: usize, shares: usize, blocks: u32) -> u32 {
    let first = u64::from(blocks) * share as u64 / shares as u64;
    u32::try_from(first).unwrap_or(blocks)
}

/// Who works on a grid besides the caller.
#[derive(Default)]
struct Team {
    inside: usize,
    /// The caller is done: nobody else may come in.
    closed: bool,
}

// SAFETY: the parameters, and everything that they and the kernel point to, are valid until the grid is closed and the
// team has left, which the caller waits for; nobody looks at them afterwards. Kernels are made to be run by many threads.
unsafe impl Send for Grid {}
// SAFETY: as above; the rest is atomics and locks.
unsafe impl Sync for Grid {}

impl Grid {
    /// Runs blocks until there are none left.
    fn work(&self) -> Result<()> {
        let known = lock(&self.places).pop();
        let mut place = known.map_or_else(Place::new, Ok)?;
        let shared = place.shared(self.shared_bytes)?;
        // Blocks beside each other add to the same sums, so each thread begins with a share of its own.
        let own = self.came.fetch_add(1, Ordering::Relaxed);
        let shares = self.next.len();
        for share in (own..own + shares).map(|share| share % shares) {
            let end = self.first_of(share + 1);
            loop {
                // Never wraps: each thread goes past the end once.
                let block = self.next[share].fetch_add(1, Ordering::Relaxed);
                if block >= end {
                    break;
                }
                // SAFETY: the function is an image's, which has this type; the place is this thread's alone and as large
                // as the image was compiled for; the parameters are the caller's.
                unsafe { (self.run)(place.region, self.parameters, block, self.blocks, self.threads, shared) };
            }
        }
        lock(&self.places).push(place);
        Ok(())
    }

    /// The first block of a share.
    fn first_of(&self, share: usize) -> u32 {
        first_of(share, self.next.len(), self.blocks)
    }

    /// A helper's whole visit.
    fn help(&self) {
        {
            let mut team = lock(&self.team);
            if team.closed {
                return;
            }
            team.inside += 1;
        }
        let _leaving = Leaving(self);
        if let Err(error) = self.work() {
            // The caller, who cannot do without, runs what is left.
            log::warn!("oeq-native: a thread could not help: {error}");
        }
    }

    /// Keeps helpers out from now on, and waits for those that are inside.
    fn close(&self) {
        let mut team = lock(&self.team);
        team.closed = true;
        while team.inside > 0 {
            team = self.left.wait(team).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A helper that has come in goes out again, whatever happens: the caller waits for it.
struct Leaving<'a>(&'a Grid);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        lock(&self.0.team).inside -= 1;
        self.0.left.notify_all();
    }
}

/// A grid that is closed, whatever happens, before its parameters go.
struct Closing<'a>(&'a Grid);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The task of a lent thread.
///
/// # Safety
/// `data` is a counted reference to a [`Grid`] that was given away with the task.
unsafe extern "C" fn help(data: *mut c_void) {
    // SAFETY: by the function's contract.
    let grid = unsafe { Arc::from_raw(data.cast_const().cast::<Grid>()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || grid.help())) {
        // What was thrown may throw again, and the thread is somebody else's.
        std::mem::forget(panic);
    }
}

impl Host {
    /// Asks up to `wanted` threads to help with a grid: lent ones, and the device's own where none are lent.
    fn ask(&self, grid: &Arc<Grid>, lent: Option<&Threads<'_>>, wanted: usize) {
        let mut asked = 0;
        while let Some(threads) = lent.filter(|_| asked < wanted) {
            let data = Arc::into_raw(Arc::clone(grid));
            // SAFETY: the task takes one reference of this grid, which is given away with it.
            if let Err(error) = unsafe { threads.0.lend(help, data.cast_mut().cast()) } {
                // SAFETY: the reference was not taken.
                drop(unsafe { Arc::from_raw(data) });
                log::debug!("oeq-native: {asked} of {wanted} threads were lent: {error}");
                break;
            }
            asked += 1;
        }
        for _ in asked..wanted {
            let grid = Arc::clone(grid);
            // A thread that cannot be had is not needed.
            drop(self.team.submit(0, Box::new(move || grid.help())));
        }
    }
}

struct LoadedLibrary {
    functions: SmallVec<[Function; 4]>,
    /// Keeps the functions above loaded.
    _library: Library,
}

impl Module for LoadedLibrary {
    fn function(&self, index: usize) -> Option<Function> {
        self.functions.get(index).copied()
    }
}

impl Driver for Host {
    fn architectures(&self) -> Result<&[Architecture]> {
        Ok(&[Architecture::HOST])
    }

    fn load(&self, _ordinal: u32, image: &Image, functions: &[FunctionSpec<'_>]) -> Result<Box<dyn Module>> {
        // The loader wants a file, and only until it has mapped it.
        let folder = PrivateFolder::new()?;
        let path = folder.write("kernel.so", &image.code)?;
        // SAFETY: the image was made by our compiler from our header; a library without initialisers of its own.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
            Error::precondition(format!(
                "the compiled kernel cannot be loaded (is {} mounted noexec? TMPDIR says where to put it): {error}",
                std::env::temp_dir().display()
            ))
        })?;
        let mut found = SmallVec::new();
        for spec in functions {
            if spec.shared_bytes > MAX_SHARED {
                return Err(Error::precondition(format!(
                    "entry point `{}` needs {} bytes of shared memory per block; the host platform allows {MAX_SHARED}",
                    spec.entry, spec.shared_bytes
                )));
            }
            // SAFETY: every symbol of an image is a function of this type.
            let function = unsafe { library.get::<RunBlock>(spec.symbol.as_bytes()) }.map_err(|error| {
                Error::internal(format!("looking up entry point `{}` in its image: {error}", spec.entry))
            })?;
            found.push(Function(*function as usize));
        }
        Ok(Box::new(LoadedLibrary { functions: found, _library: library }))
    }

    /// The stream is null, or what [`Threads::as_stream`] made of threads that live through the call.
    unsafe fn enqueue(&self, _ordinal: u32, stream: Stream, work: &Work<'_>) -> Result<()> {
        // SAFETY: null, or threads that live through the call.
        let lent = unsafe { stream.0.cast_const().cast::<Threads<'_>>().as_ref() };
        let most = lent.map_or(self.threads, |threads| self.threads.min(threads.0.threads() + 1));
        for zero in work.zeros {
            let bytes = usize::try_from(zero.bytes).unwrap_or(usize::MAX);
            // SAFETY: the caller vouches for addresses, which are the host's own here.
            unsafe { ptr::write_bytes(zero.address as *mut u8, 0, bytes) };
        }
        for (launch, function) in work.launches.iter().zip(work.functions) {
            let words = &work.words[launch.words.clone()];
            let parameters: SmallVec<[*mut c_void; 16]> =
                launch.parameters.iter().map(|first| words[usize::from(*first)..].as_ptr().cast_mut().cast()).collect();
            let shares = most.min(launch.blocks as usize).max(1);
            let grid = Arc::new(Grid {
                // SAFETY: the function came from `load`, which looked it up as one of this type.
                run: unsafe { std::mem::transmute::<usize, RunBlock>(function.0) },
                parameters: parameters.as_ptr(),
                blocks: launch.blocks,
                threads: launch.threads,
                shared_bytes: launch.shared_bytes,
                next: (0..shares).map(|share| AtomicU32::new(first_of(share, shares, launch.blocks))).collect(),
                came: AtomicUsize::new(0),
                places: Arc::clone(&self.places),
                team: Mutex::default(),
                left: Condvar::new(),
            });
            let closing = Closing(&grid);
            self.ask(&grid, lent, shares - 1);
            let outcome = grid.work();
            drop(closing);
            outcome.map_err(|error| error.context(format_args!("running `{}`", launch.entry)))?;
        }
        Ok(())
    }
}
