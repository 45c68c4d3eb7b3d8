//! A call that comes again and again, kept as an executable graph of the driver.
//!
//! Enqueuing a graph takes the host a third of what one launch takes, however many kernels it has (1.1 us for one to five
//! against 3.3 us for each launch; H200, December 2026), and the device begins each kernel sooner after the one before. So
//! a call site that was called a few times gets a graph of its own: the zeroing kernel, then the call's launches, one after
//! another as on a stream. From call to call only addresses change. A kernel whose parameters are still the same is left
//! alone; another is given its new ones, which takes 0.2 us.
//!
//! * A graph is neither made nor used on a stream that is being captured. XLA's command buffers want the launches
//!   themselves, and once they have them the call comes no more.
//! * A graph belongs to one stream and is used by one thread at a time. Whoever comes with another stream, or finds it in
//!   use, launches; nobody waits. It moves when only the other stream comes any more.
//! * Making one takes the host a third of a millisecond, and may wait for what runs on the device: now and then the driver
//!   gets memory for graphs. XLA's call sites have one once; an operator whose sizes change waits for longer before the next.
//! * Whatever goes wrong with a graph costs the graph, never the call, which is then made of launches.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use cust::sys::{CUcontext, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUstream};
use smallvec::SmallVec;

use super::cuda::{Current, Regions, RelaxedCapture, ZERO_FILL_THREADS, check, parameter_buffer, regions};
use super::{Function, Work, Zero};
use crate::error::{Error, Result};

unsafe extern "C" {
    fn cuStreamIsCapturing(stream: CUstream, status: *mut c_int) -> c_int;
    fn cuGraphCreate(graph: *mut CUgraph, flags: c_uint) -> c_int;
    fn cuGraphAddKernelNode(
        node: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        count: usize,
        parameters: *const KernelNode,
    ) -> c_int;
    fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong) -> c_int;
    fn cuGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, parameters: *const KernelNode) -> c_int;
    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) -> c_int;
    fn cuGraphExecDestroy(exec: CUgraphExec) -> c_int;
    fn cuGraphDestroy(graph: CUgraph) -> c_int;
}

/// `CUDA_KERNEL_NODE_PARAMS`, version 1, which every driver since CUDA 10 takes under the functions' plain names.
#[repr(C)]
struct KernelNode {
    function: CUfunction,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
}

/// Calls that are made of launches before a site gets a graph. XLA calls a site twice and then no more where it has put it
/// into a command buffer.
const DIRECT_CALLS: u32 = 4;
/// The same for a site that took another's place, and may soon lose it: by then a graph would have paid for itself.
const DIRECT_CALLS_AFTER_CHANGE: u32 = 256;

/// The graphs of one call site, one for each device at most.
pub struct Replays {
    devices: OnceLock<Box<[Slot]>>,
    direct_calls: u32,
}

impl Default for Replays {
    fn default() -> Self {
        Self { devices: OnceLock::new(), direct_calls: DIRECT_CALLS }
    }
}

impl Replays {
    /// Those of a site that took the place of another.
    #[must_use]
    pub fn after_change() -> Self {
        Self { direct_calls: DIRECT_CALLS_AFTER_CHANGE, ..Self::default() }
    }
}

impl std::fmt::Debug for Replays {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replays").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Slot {
    taken: AtomicBool,
    stage: UnsafeCell<Stage>,
}

// SAFETY: `stage` is reached through `Slot::enter` only, which lets one thread in at a time. What is in it, handles of the
// driver, may be used from any thread.
unsafe impl Send for Slot {}
// SAFETY: as above.
unsafe impl Sync for Slot {}

enum Stage {
    /// So many calls were made of launches.
    Direct(u32),
    Graph(Box<Graph>),
    /// A graph could not be had, or failed.
    Never,
}

impl Default for Stage {
    fn default() -> Self {
        Self::Direct(0)
    }
}

/// The right to look at a slot's stage.
struct Entered<'a>(&'a Slot);

impl Slot {
    #[inline]
    fn enter(&self) -> Option<Entered<'_>> {
        // Made only where it was free: dropping an `Entered` gives the slot back.
        if self.taken.swap(true, Ordering::Acquire) { None } else { Some(Entered(self)) }
    }
}

impl Entered<'_> {
    #[inline]
    fn stage(&mut self) -> &mut Stage {
        // SAFETY: `taken` was false and is true until this goes, so no other thread is here, and this thread's reference
        // ends with the borrow of `self`.
        unsafe { &mut *self.0.stage.get() }
    }
}

impl Drop for Entered<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Where a call goes.
pub(super) struct Place {
    pub(super) ordinal: u32,
    /// How many devices there are.
    pub(super) devices: usize,
    /// The device's primary context, which is current.
    pub(super) context: CUcontext,
    pub(super) stream: CUstream,
    pub(super) multiprocessors: u32,
    /// The zeroing kernel.
    pub(super) zero_fill: Option<usize>,
}

/// Enqueues a call by its graph, and says whether it did.
///
/// # Safety
/// As for [`super::Driver::enqueue`]; the place is the stream's.
#[inline]
pub(super) unsafe fn enqueue(replays: &Replays, place: &Place, work: &Work<'_>) -> bool {
    if work.launches.is_empty() || (place.zero_fill.is_none() && !work.zeros.is_empty()) {
        return false;
    }
    let Some(devices) = replays.devices.get() else {
        replays.devices.get_or_init(|| (0..place.devices).map(|_| Slot::default()).collect());
        return false;
    };
    let Some(mut slot) = devices.get(place.ordinal as usize).and_then(Slot::enter) else { return false };
    let stage = slot.stage();
    match stage {
        Stage::Graph(graph) => {
            if !graph.belongs_to(place.stream) || is_capturing(place.stream) {
                return false;
            }
            // SAFETY: by this function's contract; the slot is this thread's.
            match unsafe { graph.launch(place, work) } {
                Ok(()) => true,
                Err(error) => {
                    give_up(stage, &error);
                    false
                }
            }
        }
        Stage::Direct(calls) if *calls + 1 < replays.direct_calls => {
            *calls += 1;
            false
        }
        // SAFETY: by this function's contract.
        Stage::Direct(_) if !is_capturing(place.stream) => unsafe { first(stage, place, work) },
        Stage::Direct(_) | Stage::Never => false,
    }
}

/// Makes the graph and enqueues the call by it.
///
/// # Safety
/// As for [`enqueue`].
#[cold]
unsafe fn first(stage: &mut Stage, place: &Place, work: &Work<'_>) -> bool {
    // SAFETY: by this function's contract.
    let made = unsafe {
        Graph::new(place, work).and_then(|graph| {
            graph.enqueue()?;
            Ok(graph)
        })
    };
    match made {
        Ok(graph) => {
            *stage = Stage::Graph(Box::new(graph));
            true
        }
        Err(error) => {
            give_up(stage, &error);
            false
        }
    }
}

#[cold]
fn give_up(stage: &mut Stage, error: &Error) {
    log::debug!("oeq-native: this call site goes on without a graph: {error}");
    *stage = Stage::Never;
}

/// Whether a stream is being captured, or cannot tell.
#[inline]
pub(super) fn is_capturing(stream: CUstream) -> bool {
    let mut status = 0;
    // SAFETY: the stream is alive by the contract of `enqueue`; the driver writes one int.
    let answer = unsafe { cuStreamIsCapturing(stream, &raw mut status) };
    answer != 0 || status != 0
}

/// An executable graph, and the parameters that its kernels have.
struct Graph {
    context: CUcontext,
    stream: CUstream,
    /// Calls on other streams since the last one on its own.
    elsewhere: u32,
    /// Its nodes' names are this graph's.
    template: CUgraph,
    exec: CUgraphExec,
    /// First those of the zeroing kernel, then one for each launch.
    nodes: SmallVec<[CUgraphNode; 6]>,
    zeros: SmallVec<[Zero; 4]>,
    functions: SmallVec<[Function; 4]>,
    words: Vec<u64>,
}

impl Graph {
    /// # Safety
    /// As for [`enqueue`].
    unsafe fn new(place: &Place, work: &Work<'_>) -> Result<Self> {
        // What a graph takes of the device must not disturb a capture on another thread.
        let _relaxed = RelaxedCapture::enter()?;
        let mut graph = Self {
            context: place.context,
            stream: place.stream,
            elsewhere: 0,
            template: ptr::null_mut(),
            exec: ptr::null_mut(),
            nodes: SmallVec::new(),
            zeros: SmallVec::from_slice(work.zeros),
            functions: SmallVec::from_slice(work.functions),
            words: work.words.to_vec(),
        };
        // SAFETY: the driver writes one handle.
        check(unsafe { cuGraphCreate(&raw mut graph.template, 0) }, "cuGraphCreate")?;
        for zeros in regions(work.zeros) {
            // SAFETY: by this function's contract.
            unsafe { with_zero_fill(place, zeros, |node| graph.add(node))? };
        }
        for index in 0..work.launches.len() {
            // SAFETY: by this function's contract.
            unsafe { with_launch(work, index, |node| graph.add(node))? };
        }
        // SAFETY: the graph is whole; the driver writes one handle.
        let status = unsafe { cuGraphInstantiateWithFlags(&raw mut graph.exec, graph.template, 0) };
        check(status, "cuGraphInstantiate")?;
        Ok(graph)
    }

    /// Whether the graph may be used on a stream. Run on two, it would make them wait for one another.
    #[inline]
    fn belongs_to(&mut self, stream: CUstream) -> bool {
        if self.stream == stream {
            self.elsewhere = 0;
        } else {
            self.elsewhere += 1;
            if self.elsewhere < DIRECT_CALLS {
                return false;
            }
            (self.stream, self.elsewhere) = (stream, 0);
        }
        true
    }

    /// Adds a kernel after the last one.
    fn add(&mut self, node: &KernelNode) -> Result<()> {
        let mut added = ptr::null_mut();
        let last = self.nodes.last().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: the graph is alive, the dependency is a node of it, and the driver copies the parameters.
        let status =
            unsafe { cuGraphAddKernelNode(&raw mut added, self.template, last, usize::from(!last.is_null()), node) };
        check(status, "cuGraphAddKernelNode")?;
        self.nodes.push(added);
        Ok(())
    }

    /// Gives new parameters to the kernels that need them, and enqueues.
    ///
    /// # Safety
    /// As for [`enqueue`]; after an error the graph is used no more.
    #[inline]
    unsafe fn launch(&mut self, place: &Place, work: &Work<'_>) -> Result<()> {
        let zeroing = self.nodes.len().checked_sub(work.launches.len());
        let same_shape = self.zeros.len() == work.zeros.len()
            && self.words.len() == work.words.len()
            && self.functions[..] == *work.functions;
        let (Some(zeroing), true) = (zeroing, same_shape) else { return Err(changed()) };
        let exec = self.exec;
        if self.zeros[..] != *work.zeros {
            for (zeros, node) in regions(work.zeros).zip(&self.nodes) {
                // SAFETY: by this function's contract.
                unsafe { with_zero_fill(place, zeros, |to| set(exec, *node, to))? };
            }
            self.zeros.copy_from_slice(work.zeros);
        }
        if self.words[..] != *work.words {
            for (index, (launch, node)) in work.launches.iter().zip(&self.nodes[zeroing..]).enumerate() {
                if self.words.get(launch.words.clone()) != work.words.get(launch.words.clone()) {
                    // SAFETY: by this function's contract.
                    unsafe { with_launch(work, index, |to| set(exec, *node, to))? };
                }
            }
            self.words.copy_from_slice(work.words);
        }
        self.enqueue()
    }

    #[inline]
    fn enqueue(&self) -> Result<()> {
        // SAFETY: the graph is executable; its kernels' parameters are those of the call, and the stream is the call's.
        check(unsafe { cuGraphLaunch(self.exec, self.stream) }, "cuGraphLaunch")
    }
}

#[cold]
fn changed() -> Error {
    Error::internal("the call is not the one that the graph was made of")
}

impl Drop for Graph {
    fn drop(&mut self) {
        // The driver lets a graph that is still running end first. At process exit the driver may be gone already.
        let (Ok(_current), Ok(_relaxed)) = (Current::enter(self.context), RelaxedCapture::enter()) else { return };
        // SAFETY: the handles came from the driver and are used no more; null ones were never made.
        unsafe {
            if !self.exec.is_null() {
                cuGraphExecDestroy(self.exec);
            }
            if !self.template.is_null() {
                cuGraphDestroy(self.template);
            }
        }
    }
}

/// New parameters for a kernel.
#[inline]
fn set(exec: CUgraphExec, node: CUgraphNode, to: &KernelNode) -> Result<()> {
    // SAFETY: the node is one of the graph that was made executable, and the driver copies the parameters.
    check(unsafe { cuGraphExecKernelNodeSetParams(exec, node, to) }, "cuGraphExecKernelNodeSetParams")
}

/// Calls `with` with the zeroing kernel as a node, for at most as many regions as it takes.
///
/// # Safety
/// As for [`enqueue`]; there is a zeroing kernel.
#[inline]
unsafe fn with_zero_fill(place: &Place, zeros: &[Zero], with: impl FnOnce(&KernelNode) -> Result<()>) -> Result<()> {
    let (mut regions, blocks) = Regions::of(zeros, place.multiprocessors);
    let mut parameters = [(&raw mut regions).cast::<c_void>()];
    with(&KernelNode {
        function: place.zero_fill.unwrap_or_default() as CUfunction,
        grid: [blocks, 1, 1],
        block: [ZERO_FILL_THREADS, 1, 1],
        shared_bytes: 0,
        parameters: parameters.as_mut_ptr(),
        extra: ptr::null_mut(),
    })
}

/// Calls `with` with a launch of the work as a node.
///
/// # Safety
/// As for [`enqueue`].
#[inline]
unsafe fn with_launch(work: &Work<'_>, index: usize, with: impl FnOnce(&KernelNode) -> Result<()>) -> Result<()> {
    let launch = work.launches.get(index).zip(work.functions.get(index));
    let Some(((launch, function), words)) = launch.and_then(|pair| Some((pair, work.words.get(pair.0.words.clone())?)))
    else {
        return Err(changed());
    };
    let mut bytes = size_of_val(words);
    let mut buffer = parameter_buffer(words, &mut bytes);
    with(&KernelNode {
        function: function.0 as CUfunction,
        grid: [launch.blocks, 1, 1],
        block: [launch.threads, 1, 1],
        shared_bytes: launch.shared_bytes,
        parameters: ptr::null_mut(),
        extra: buffer.as_mut_ptr(),
    })
}
