//! What the runtime asks of a device: one small trait, and its backends, the CUDA driver and the host CPU.
//!
//! A backend knows nothing of XLA or of payloads. It loads compiled images and enqueues zeroing and launches on a stream
//! that somebody else made. It keeps the caller's current context as it was.

pub mod cuda;
#[cfg(feature = "host")]
pub mod host;
pub mod known;
pub mod replay;
pub mod symbols;

use std::ffi::c_void;
use std::ops::Range;

use smallvec::SmallVec;

use self::replay::Replays;
use crate::compile::{Architecture, Image};
use crate::error::Result;

/// A stream handle of the backend: a `CUstream`, as XLA hands it out; on the host, what `host::Threads::as_stream` answers,
/// or null.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream(pub *mut c_void);

/// A kernel ready to launch (`CUfunction`): the backend's own handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Function(pub usize);

/// An entry point to look up in an image when it is loaded.
#[derive(Debug, Clone, Copy)]
pub struct FunctionSpec<'a> {
    /// Entry point as the payload names it, for error texts.
    pub entry: &'a str,
    /// Symbol in the image.
    pub symbol: &'a str,
    /// Dynamic shared memory in bytes that its launches will ask for.
    pub shared_bytes: u32,
}

/// An image loaded on one device; unloaded when dropped.
pub trait Module: Send + Sync {
    /// The function of the spec at `index`, in the order given to [`Driver::load`].
    fn function(&self, index: usize) -> Option<Function>;
}

/// Memory to fill with zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zero {
    /// Device address.
    pub address: u64,
    /// Bytes; not 0.
    pub bytes: u64,
}

/// One launch of a one-dimensional grid, but for the function and the parameters' values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchSpec {
    /// Entry point, for error texts.
    pub entry: &'static str,
    /// Blocks in the grid.
    pub blocks: u32,
    /// Threads in a block.
    pub threads: u32,
    /// Dynamic shared memory, bytes.
    pub shared_bytes: u32,
    /// The range of words that are this launch's parameters: 64-bit values one after another, as the kernel's own
    /// parameters lie in memory.
    pub words: Range<usize>,
    /// The first word of each parameter, counted from the beginning of the range.
    pub parameters: SmallVec<[u8; 16]>,
}

/// What one call enqueues, in this order: zeros, then launches.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// Memory to zero.
    pub zeros: &'a [Zero],
    /// The launches.
    pub launches: &'a [LaunchSpec],
    /// The function of each launch.
    pub functions: &'a [Function],
    /// The parameters' values.
    pub words: &'a [u64],
    /// What the backend keeps of the call site that the work is of, from call to call. `None`: nothing is to be kept.
    pub replays: Option<&'a Replays>,
}

/// A device backend.
pub trait Driver: Send + Sync {
    /// The architecture of each device that the process sees, by ordinal.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` where there is no driver or no device.
    fn architectures(&self) -> Result<&[Architecture]>;

    /// Loads an image on a device and makes its functions ready: looked up, resident, shared memory limits raised.
    /// Safe while any stream of the process is being captured.
    ///
    /// # Errors
    /// The driver's, or a device that cannot give the shared memory asked for (both numbers are in the text).
    fn load(&self, ordinal: u32, image: &Image, functions: &[FunctionSpec<'_>]) -> Result<Box<dyn Module>>;

    /// Enqueues zeroing, then launches, on a stream of the device. Only enqueues: no allocation, no synchronisation, but
    /// where it makes something that later calls of the same site are cheaper by, once.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// The stream is alive and belongs to the device; functions come from modules loaded on it that outlive the work;
    /// every address is valid for what the kernels do with it, and parameters match the kernels' own.
    unsafe fn enqueue(&self, ordinal: u32, stream: Stream, work: &Work<'_>) -> Result<()>;

    /// Whether what is enqueued on a stream now goes into a graph that somebody may run later, or cannot tell.
    ///
    /// # Safety
    /// The stream is alive and belongs to the device.
    unsafe fn is_capturing(&self, ordinal: u32, stream: Stream) -> bool {
        let _ = (ordinal, stream);
        false
    }
}
