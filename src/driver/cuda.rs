//! The CUDA backend: primary contexts, modules, memsets and launches through the driver API.
//!
//! Handle types and enumerations are `cust`'s. The functions are declared here once more because `cust`'s return a Rust enum,
//! and a driver newer than its bindings answers numbers that the enum does not have, which would be undefined behaviour.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use cust::sys::{CUcontext, CUdevice, CUfunction, CUmodule, CUstream};
use smallvec::SmallVec;

use super::replay::{self, Place};
use super::{Driver, Function, FunctionSpec, Module, Stream, Work, Zero, symbols};
use crate::compile::{Architecture, Image};
use crate::error::{Code, Error, Result};

unsafe extern "C" {
    fn cuInit(flags: c_uint) -> c_int;
    fn cuGetErrorName(status: c_int, text: *mut *const c_char) -> c_int;
    fn cuGetErrorString(status: c_int, text: *mut *const c_char) -> c_int;
    fn cuDeviceGetCount(count: *mut c_int) -> c_int;
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> c_int;
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) -> c_int;
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> c_int;
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> c_int;
    fn cuCtxGetCurrent(context: *mut CUcontext) -> c_int;
    fn cuCtxPushCurrent_v2(context: CUcontext) -> c_int;
    fn cuCtxPopCurrent_v2(context: *mut CUcontext) -> c_int;
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> c_int;
    fn cuModuleUnload(module: CUmodule) -> c_int;
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> c_int;
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction) -> c_int;
    fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> c_int;
    fn cuMemsetD8Async(address: u64, value: u8, bytes: usize, stream: CUstream) -> c_int;
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> c_int;
    fn cuEventCreate(event: *mut *mut c_void, flags: c_uint) -> c_int;
    fn cuEventDestroy_v2(event: *mut c_void) -> c_int;
    fn cuEventRecord(event: *mut c_void, stream: CUstream) -> c_int;
    fn cuEventSynchronize(event: *mut c_void) -> c_int;
    fn cuEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) -> c_int;
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int;
    fn cuMemFree_v2(address: u64) -> c_int;
    fn cuMemsetD32_v2(address: u64, value: c_uint, count: usize) -> c_int;
    fn cuCtxSynchronize() -> c_int;
}

/// PTX of `kernels/zero_fill.cu`, NUL-terminated.
const ZERO_FILL: &str = concat!(include_str!("../../kernels/zero_fill.ptx"), "\0");
/// Regions that one launch of it takes.
const REGIONS: usize = 4;
/// Threads of its blocks.
pub(super) const ZERO_FILL_THREADS: u32 = 256;
/// The most blocks that it gets for each multiprocessor: as many as can be there at a time.
const ZERO_FILL_WAVES: u32 = 8;
/// Up to this size a memset costs the host a quarter of a launch (0.8 us against 3.5 us, H200, December 2026); above, as much
/// as one.
const SMALL_MEMSET: u64 = 4096;

/// The zeroing kernel's parameter.
#[repr(C)]
pub(super) struct Regions {
    address: [u64; REGIONS],
    bytes: [u64; REGIONS],
    count: u64,
}

impl Regions {
    /// The parameter for at most [`REGIONS`] regions, and how many blocks the launch should have.
    #[inline]
    pub(super) fn of(zeros: &[Zero], multiprocessors: u32) -> (Self, u32) {
        let mut regions = Self { address: [0; REGIONS], bytes: [0; REGIONS], count: 0 };
        let mut most = 0;
        for (index, zero) in zeros.iter().take(REGIONS).enumerate() {
            regions.address[index] = zero.address;
            regions.bytes[index] = zero.bytes;
            regions.count += 1;
            most = most.max(zero.bytes);
        }
        let needed = (most / (16 * u64::from(ZERO_FILL_THREADS))).clamp(1, u64::from(u32::MAX));
        let blocks = u32::try_from(needed).unwrap_or(u32::MAX).min(ZERO_FILL_WAVES * multiprocessors);
        (regions, blocks)
    }
}

/// As many regions at a time as one launch of the zeroing kernel takes.
#[inline]
pub(super) fn regions(zeros: &[Zero]) -> std::slice::Chunks<'_, Zero> {
    zeros.chunks(REGIONS)
}

/// The list that passes parameters as one buffer, which spares the driver the look at every one of them. `bytes` is the
/// buffer's size. The driver copies the buffer and does not write to it.
#[inline]
pub(super) fn parameter_buffer(words: &[u64], bytes: &mut usize) -> [*mut c_void; 5] {
    [
        number::LAUNCH_PARAM_BUFFER_POINTER,
        words.as_ptr().cast_mut().cast::<c_void>(),
        number::LAUNCH_PARAM_BUFFER_SIZE,
        ptr::from_mut(bytes).cast::<c_void>(),
        ptr::null_mut(),
    ]
}

/// Whether one launch is cheaper than the memsets.
#[inline]
fn one_launch_is_cheaper(zeros: &[Zero]) -> bool {
    zeros.len() > 1 && (zeros.len() > REGIONS || zeros.iter().any(|zero| zero.bytes > SMALL_MEMSET))
}

/// The driver's numbers for what is asked here (`CUdevice_attribute`, `CUfunction_attribute`, `CUstreamCaptureMode`).
mod number {
    use std::ffi::{c_int, c_void};
    pub(super) const WARP_SIZE: c_int = 10;
    pub(super) const MULTIPROCESSOR_COUNT: c_int = 16;
    pub(super) const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    pub(super) const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    pub(super) const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
    pub(super) const FUNCTION_STATIC_SHARED_BYTES: c_int = 1;
    pub(super) const FUNCTION_MAX_DYNAMIC_SHARED_BYTES: c_int = 8;
    pub(super) const CAPTURE_MODE_RELAXED: c_int = 2;
    pub(super) const LAUNCH_PARAM_BUFFER_POINTER: *mut c_void = std::ptr::without_provenance_mut(1);
    pub(super) const LAUNCH_PARAM_BUFFER_SIZE: *mut c_void = std::ptr::without_provenance_mut(2);
}

const CUDA_ERROR_INVALID_IMAGE: c_int = 200;
const CUDA_ERROR_NO_BINARY_FOR_GPU: c_int = 209;
const CUDA_ERROR_OUT_OF_MEMORY: c_int = 2;
const CUDA_ERROR_NO_DEVICE: c_int = 100;

fn text(get: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int, status: c_int) -> Option<String> {
    let mut text: *const c_char = ptr::null();
    // SAFETY: the driver writes null or a pointer to a constant text.
    unsafe {
        if get(status, &raw mut text) != 0 || text.is_null() {
            return None;
        }
        Some(CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

/// A driver status as an error, told with what was attempted.
#[cold]
fn failure(status: c_int, attempt: &str) -> Error {
    if status == symbols::STUB_LIBRARY {
        return symbols::driver_available().err().unwrap_or_else(|| {
            Error::precondition(format!("{attempt}: the installed CUDA driver lacks this function; it is too old"))
        });
    }
    let name = text(cuGetErrorName, status).unwrap_or_else(|| "an unknown status".to_owned());
    let meaning = text(cuGetErrorString, status).unwrap_or_default();
    let code = match status {
        CUDA_ERROR_OUT_OF_MEMORY => Code::ResourceExhausted,
        CUDA_ERROR_NO_DEVICE | CUDA_ERROR_NO_BINARY_FOR_GPU | CUDA_ERROR_INVALID_IMAGE => Code::FailedPrecondition,
        _ => Code::Internal,
    };
    Error::new(code, format!("{attempt}: the CUDA driver answered {name} ({status}): {meaning}"))
}

#[inline]
pub(super) fn check(status: c_int, attempt: &str) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(failure(status, attempt)) }
}

fn attribute(device: CUdevice, attribute: c_int, attempt: &str) -> Result<c_int> {
    let mut value = 0;
    // SAFETY: the driver writes one int.
    check(unsafe { cuDeviceGetAttribute(&raw mut value, attribute, device) }, attempt)?;
    Ok(value)
}

/// One device, as the process sees it.
#[derive(Debug)]
struct Device {
    handle: CUdevice,
    multiprocessors: u32,
    /// Address of the primary context, retained once for the life of the process.
    context: OnceLock<usize>,
    /// Address of the zeroing kernel's function, `None` where the driver cannot finish its PTX. Loaded with the first image,
    /// so it is there before anything is enqueued.
    zero_fill: OnceLock<Option<usize>>,
}

#[derive(Debug)]
struct Devices {
    list: Vec<Device>,
    architectures: Vec<Architecture>,
}

impl Device {
    /// The primary context; null before it was first entered.
    #[inline]
    fn context(&self) -> CUcontext {
        self.context.get().map_or(ptr::null_mut(), |context| *context as CUcontext)
    }
}

impl Devices {
    #[inline]
    fn get(&self, ordinal: u32) -> Result<&Device> {
        self.list.get(ordinal as usize).ok_or_else(|| {
            Error::invalid(format!("device ordinal {ordinal} does not exist; this process sees {}", self.list.len()))
        })
    }
}

/// The CUDA driver. Making one costs nothing; the driver is opened at first use.
#[derive(Debug, Default)]
pub struct Cuda {
    devices: OnceLock<Devices>,
}

impl Cuda {
    fn devices(&self) -> Result<&Devices> {
        // A failure is not kept: a process may gain a driver or a device later, and asking again is cheap.
        if let Some(devices) = self.devices.get() {
            return Ok(devices);
        }
        symbols::driver_available()?;
        // SAFETY: cuInit may be called any number of times from any thread.
        check(unsafe { cuInit(0) }, "cuInit")?;
        let mut count = 0;
        // SAFETY: the driver writes one int.
        check(unsafe { cuDeviceGetCount(&raw mut count) }, "cuDeviceGetCount")?;
        if count < 1 {
            return Err(Error::precondition("the CUDA driver sees no device (is CUDA_VISIBLE_DEVICES empty?)"));
        }
        let mut list = Vec::new();
        let mut architectures = Vec::new();
        for ordinal in 0..count {
            let mut handle = 0;
            // SAFETY: the driver writes one int.
            check(unsafe { cuDeviceGet(&raw mut handle, ordinal) }, "cuDeviceGet")?;
            let attempt = "cuDeviceGetAttribute(compute capability)";
            let major = attribute(handle, number::COMPUTE_CAPABILITY_MAJOR, attempt)?;
            let minor = attribute(handle, number::COMPUTE_CAPABILITY_MINOR, attempt)?;
            architectures.push(Architecture {
                major: u16::try_from(major).unwrap_or_default(),
                minor: u16::try_from(minor).unwrap_or_default(),
            });
            let multiprocessors =
                attribute(handle, number::MULTIPROCESSOR_COUNT, "cuDeviceGetAttribute(multiprocessors)")?;
            list.push(Device {
                handle,
                multiprocessors: u32::try_from(multiprocessors).unwrap_or(1).max(1),
                context: OnceLock::new(),
                zero_fill: OnceLock::new(),
            });
        }
        Ok(self.devices.get_or_init(|| Devices { list, architectures }))
    }

    fn device(&self, ordinal: u32) -> Result<&Device> {
        self.devices()?.get(ordinal)
    }

    /// The device's primary context, made current for as long as the guard lives.
    fn enter(&self, ordinal: u32) -> Result<Current> {
        Self::enter_device(self.device(ordinal)?)
    }

    #[inline]
    fn enter_device(device: &Device) -> Result<Current> {
        let context = if let Some(context) = device.context.get() {
            *context
        } else {
            let mut context: CUcontext = ptr::null_mut();
            // SAFETY: the driver writes one handle. Retained once more if two threads race; the count only matters to a
            // release, which never happens.
            let status = unsafe { cuDevicePrimaryCtxRetain(&raw mut context, device.handle) };
            check(status, "cuDevicePrimaryCtxRetain")?;
            *device.context.get_or_init(|| context as usize)
        };
        Current::enter(context as CUcontext)
    }

    /// Loads the zeroing kernel on a device whose context is current. Where that fails, memsets do its work.
    fn load_zero_fill(device: &Device) {
        device.zero_fill.get_or_init(|| {
            let mut module: CUmodule = ptr::null_mut();
            let mut function: CUfunction = ptr::null_mut();
            // SAFETY: the PTX is NUL-terminated; the driver writes handles. The module stays loaded as long as the process.
            let loaded = unsafe {
                check(cuModuleLoadData(&raw mut module, ZERO_FILL.as_ptr().cast()), "loading the zeroing kernel")
                    .and_then(|()| {
                        check(cuModuleGetFunction(&raw mut function, module, c"oeq_zero_fill".as_ptr()), "its function")
                    })
            };
            match loaded {
                Ok(()) => Some(function as usize),
                Err(error) => {
                    log::warn!("oeq-native: results are zeroed by memsets: {error}");
                    None
                }
            }
        });
    }

    /// Enqueues zeroing of several regions with one launch for each four of them.
    ///
    /// # Safety
    /// As for [`Driver::enqueue`]; the context is current.
    unsafe fn launch_zero_fill(device: &Device, function: usize, zeros: &[Zero], stream: CUstream) -> Result<()> {
        for zeros in regions(zeros) {
            let (mut regions, blocks) = Regions::of(zeros, device.multiprocessors);
            let mut parameters = [(&raw mut regions).cast::<c_void>()];
            // SAFETY: the function is the kernel below and takes the structure by value; the rest is the caller's word.
            let status = unsafe {
                cuLaunchKernel(
                    function as CUfunction,
                    blocks,
                    1,
                    1,
                    ZERO_FILL_THREADS,
                    1,
                    1,
                    0,
                    stream,
                    parameters.as_mut_ptr(),
                    ptr::null_mut(),
                )
            };
            check(status, "launching the zeroing kernel")?;
        }
        Ok(())
    }

    /// Properties that OEQ's code generator asks for.
    ///
    /// # Errors
    /// No driver, or no such device.
    pub fn properties(&self, ordinal: u32) -> Result<DeviceProperties> {
        let device = self.device(ordinal)?.handle;
        let mut name = [0_u8; 256];
        // SAFETY: the driver writes at most 256 bytes, NUL-terminated.
        check(unsafe { cuDeviceGetName(name.as_mut_ptr().cast(), 256, device) }, "cuDeviceGetName")?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let get = |number| attribute(device, number, "cuDeviceGetAttribute");
        Ok(DeviceProperties {
            name,
            compute_major: get(number::COMPUTE_CAPABILITY_MAJOR)?,
            compute_minor: get(number::COMPUTE_CAPABILITY_MINOR)?,
            multiprocessor_count: get(number::MULTIPROCESSOR_COUNT)?,
            warp_size: get(number::WARP_SIZE)?,
            shared_memory_per_block: get(number::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        })
    }
}

/// What a device is like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Marketing name.
    pub name: String,
    /// Compute capability, major.
    pub compute_major: i32,
    /// Compute capability, minor.
    pub compute_minor: i32,
    /// Number of multiprocessors.
    pub multiprocessor_count: i32,
    /// Threads in a warp.
    pub warp_size: i32,
    /// The most shared memory that a block may opt in to, bytes.
    pub shared_memory_per_block: i32,
}

/// A context that is current on this thread until the guard goes, when the caller's own is current again.
pub(super) struct Current {
    pushed: bool,
}

impl Current {
    pub(super) fn enter(context: CUcontext) -> Result<Self> {
        let mut current: CUcontext = ptr::null_mut();
        // SAFETY: the driver writes one handle.
        check(unsafe { cuCtxGetCurrent(&raw mut current) }, "cuCtxGetCurrent")?;
        if current == context {
            return Ok(Self { pushed: false });
        }
        // SAFETY: the context is retained and never released.
        check(unsafe { cuCtxPushCurrent_v2(context) }, "cuCtxPushCurrent")?;
        Ok(Self { pushed: true })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = ptr::null_mut();
            // SAFETY: this thread pushed a context in `enter` and the guard is not sent elsewhere.
            unsafe { cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}

/// This thread's capture mode, relaxed until the guard goes: loading a module would otherwise invalidate a capture that
/// runs on this thread or, in global mode, on any other.
pub(super) struct RelaxedCapture {
    previous: c_int,
}

impl RelaxedCapture {
    pub(super) fn enter() -> Result<Self> {
        let mut mode = number::CAPTURE_MODE_RELAXED;
        // SAFETY: the driver swaps one int.
        check(unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "cuThreadExchangeStreamCaptureMode")?;
        Ok(Self { previous: mode })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        let mut mode = self.previous;
        // SAFETY: as in `enter`.
        unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    }
}

struct LoadedModule {
    handle: CUmodule,
    context: CUcontext,
    functions: SmallVec<[Function; 4]>,
}

// SAFETY: module, context and function handles of the driver may be used from any thread.
unsafe impl Send for LoadedModule {}
// SAFETY: as above; nothing here is changed after loading.
unsafe impl Sync for LoadedModule {}

impl Module for LoadedModule {
    fn function(&self, index: usize) -> Option<Function> {
        self.functions.get(index).copied()
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // Unloading frees device memory, which waits for the device, and would invalidate a capture elsewhere. At process
        // exit the driver may be gone already; then there is nothing left to unload.
        if let (Ok(_current), Ok(_relaxed)) = (Current::enter(self.context), RelaxedCapture::enter()) {
            // SAFETY: the handle came from cuModuleLoadData and is used no more.
            unsafe { cuModuleUnload(self.handle) };
        }
    }
}

impl Driver for Cuda {
    fn architectures(&self) -> Result<&[Architecture]> {
        Ok(&self.devices()?.architectures)
    }

    fn load(&self, ordinal: u32, image: &Image, functions: &[FunctionSpec<'_>]) -> Result<Box<dyn Module>> {
        let device = self.device(ordinal)?;
        let _current = self.enter(ordinal)?;
        let _relaxed = RelaxedCapture::enter()?;
        Self::load_zero_fill(device);
        let mut module =
            LoadedModule { handle: ptr::null_mut(), context: device.context(), functions: SmallVec::new() };
        // SAFETY: the image is a whole cubin (or NUL-terminated PTX) made by NVRTC, and the driver copies it.
        check(unsafe { cuModuleLoadData(&raw mut module.handle, image.code.as_ptr().cast()) }, "cuModuleLoadData")?;
        let allowed = attribute(
            device.handle,
            number::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            "cuDeviceGetAttribute(shared memory per block)",
        )?;
        for spec in functions {
            let symbol = CString::new(spec.symbol)
                .map_err(|_| Error::internal(format!("symbol of `{}` contains a NUL byte", spec.entry)))?;
            let mut function: CUfunction = ptr::null_mut();
            // SAFETY: the module was loaded above and the name is NUL-terminated.
            let status = unsafe { cuModuleGetFunction(&raw mut function, module.handle, symbol.as_ptr()) };
            if status != 0 {
                return Err(failure(status, &format!("looking up entry point `{}` in its image", spec.entry)));
            }
            // Asking for an attribute also makes the driver load the function now rather than at its first launch.
            let mut fixed = 0;
            // SAFETY: the driver writes one int.
            let status = unsafe { cuFuncGetAttribute(&raw mut fixed, number::FUNCTION_STATIC_SHARED_BYTES, function) };
            check(status, "cuFuncGetAttribute")?;
            let wanted = i64::from(spec.shared_bytes) + i64::from(fixed);
            if wanted > i64::from(allowed) {
                return Err(Error::new(
                    Code::FailedPrecondition,
                    format!(
                        "entry point `{}` needs {wanted} bytes of shared memory per block; device {ordinal} allows {allowed} \
                         (the model was exported for another GPU)",
                        spec.entry
                    ),
                ));
            }
            if spec.shared_bytes > 0 {
                let bytes = c_int::try_from(spec.shared_bytes).unwrap_or(c_int::MAX);
                // SAFETY: the function belongs to the module above.
                let status = unsafe { cuFuncSetAttribute(function, number::FUNCTION_MAX_DYNAMIC_SHARED_BYTES, bytes) };
                check(status, "cuFuncSetAttribute(max dynamic shared memory)")?;
            }
            module.functions.push(Function(function as usize));
        }
        Ok(Box::new(module))
    }

    #[inline]
    unsafe fn enqueue(&self, ordinal: u32, stream: Stream, work: &Work<'_>) -> Result<()> {
        let devices = self.devices()?;
        let device = devices.get(ordinal)?;
        let _current = Self::enter_device(device)?;
        let stream = stream.0.cast();
        let zero_fill = device.zero_fill.get().copied().flatten();
        if let Some(replays) = work.replays {
            let place = Place {
                ordinal,
                devices: devices.list.len(),
                context: device.context(),
                stream,
                multiprocessors: device.multiprocessors,
                zero_fill,
            };
            // SAFETY: as the caller promises; the context is current and the stream's.
            if unsafe { replay::enqueue(replays, &place, work) } {
                return Ok(());
            }
        }
        if let Some(function) = zero_fill.filter(|_| one_launch_is_cheaper(work.zeros)) {
            // SAFETY: as the caller promises; the context is current.
            unsafe { Self::launch_zero_fill(device, function, work.zeros, stream)? };
        } else {
            for zero in work.zeros {
                let bytes = usize::try_from(zero.bytes).unwrap_or(usize::MAX);
                // SAFETY: the caller vouches for addresses and stream.
                let status = unsafe { cuMemsetD8Async(zero.address, 0, bytes, stream) };
                check(status, "cuMemsetD8Async")?;
            }
        }
        for (launch, function) in work.launches.iter().zip(work.functions) {
            let Some(words) = work.words.get(launch.words.clone()) else {
                return Err(Error::internal(format!("the parameters of `{}` are incomplete", launch.entry)));
            };
            let mut bytes = size_of_val(words);
            let mut buffer = parameter_buffer(words, &mut bytes);
            // SAFETY: the caller vouches for function, stream and parameters; the driver copies the buffer before it
            // returns and does not write to it.
            let status = unsafe {
                cuLaunchKernel(
                    function.0 as CUfunction,
                    launch.blocks,
                    1,
                    1,
                    launch.threads,
                    1,
                    1,
                    launch.shared_bytes,
                    stream,
                    ptr::null_mut(),
                    buffer.as_mut_ptr(),
                )
            };
            if status != 0 {
                return Err(failure(status, &format!("launching `{}`", launch.entry)));
            }
        }
        Ok(())
    }

    #[inline]
    unsafe fn is_capturing(&self, ordinal: u32, stream: Stream) -> bool {
        self.enter(ordinal).map_or(true, |_current| replay::is_capturing(stream.0.cast()))
    }
}

/// Two events on the default stream, for timing from Python.
#[derive(Debug)]
pub struct Timer {
    start: usize,
    stop: usize,
    context: usize,
}

impl Timer {
    /// Makes a timer in the current context, or in device 0's primary context when none is current.
    ///
    /// # Errors
    /// No driver or no device.
    pub fn new(cuda: &Cuda) -> Result<Self> {
        let context = current_or_first(cuda)?;
        let _current = Current::enter(context as CUcontext)?;
        let mut events = [ptr::null_mut(); 2];
        for event in &mut events {
            // SAFETY: the driver writes one handle.
            check(unsafe { cuEventCreate(event, 0) }, "cuEventCreate")?;
        }
        Ok(Self { start: events[0] as usize, stop: events[1] as usize, context })
    }

    /// Records the start.
    ///
    /// # Errors
    /// The driver's.
    pub fn start(&self) -> Result<()> {
        let _current = Current::enter(self.context as CUcontext)?;
        // SAFETY: the event is alive; null is the default stream.
        check(unsafe { cuEventRecord(self.start as *mut c_void, ptr::null_mut()) }, "cuEventRecord")
    }

    /// Records the end, waits for it and answers the milliseconds since [`Timer::start`].
    ///
    /// # Errors
    /// The driver's; also when the timer was not started.
    pub fn stop(&self) -> Result<f32> {
        let _current = Current::enter(self.context as CUcontext)?;
        let mut milliseconds = 0.0;
        // SAFETY: the events are alive; null is the default stream; the driver writes one float.
        unsafe {
            check(cuEventRecord(self.stop as *mut c_void, ptr::null_mut()), "cuEventRecord")?;
            check(cuEventSynchronize(self.stop as *mut c_void), "cuEventSynchronize")?;
            check(
                cuEventElapsedTime(&raw mut milliseconds, self.start as *mut c_void, self.stop as *mut c_void),
                "cuEventElapsedTime",
            )?;
        }
        Ok(milliseconds)
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context as CUcontext) {
            // SAFETY: the events came from cuEventCreate and are used no more.
            unsafe {
                cuEventDestroy_v2(self.start as *mut c_void);
                cuEventDestroy_v2(self.stop as *mut c_void);
            }
        }
    }
}

fn current_or_first(cuda: &Cuda) -> Result<usize> {
    cuda.devices()?;
    let mut current: CUcontext = ptr::null_mut();
    // SAFETY: the driver writes one handle.
    check(unsafe { cuCtxGetCurrent(&raw mut current) }, "cuCtxGetCurrent")?;
    if !current.is_null() {
        return Ok(current as usize);
    }
    let _current = cuda.enter(0)?;
    // SAFETY: as above; `enter` made device 0's context current.
    check(unsafe { cuCtxGetCurrent(&raw mut current) }, "cuCtxGetCurrent")?;
    Ok(current as usize)
}

/// Overwrites more device memory than any L2 cache holds, and waits.
///
/// # Errors
/// No driver, no device or no memory.
pub fn clear_l2_cache(cuda: &Cuda) -> Result<()> {
    const WORDS: usize = 64 << 20;
    let _current = Current::enter(current_or_first(cuda)? as CUcontext)?;
    let mut address = 0;
    // SAFETY: the memory is ours between allocation and release, and the memset stays inside it.
    unsafe {
        check(cuMemAlloc_v2(&raw mut address, WORDS * 4), "cuMemAlloc")?;
        let set = check(cuMemsetD32_v2(address, 0x2a2a_2a2a, WORDS), "cuMemsetD32");
        let waited = check(cuCtxSynchronize(), "cuCtxSynchronize");
        cuMemFree_v2(address);
        set.and(waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros(bytes: &[u64]) -> Vec<Zero> {
        bytes.iter().map(|bytes| Zero { address: 256, bytes: *bytes }).collect()
    }

    #[test]
    fn small_results_get_memsets_and_several_larger_ones_one_launch() {
        assert!(!one_launch_is_cheaper(&zeros(&[])));
        assert!(!one_launch_is_cheaper(&zeros(&[1 << 30])));
        assert!(!one_launch_is_cheaper(&zeros(&[4096, 4096, 4096, 4096])));
        assert!(one_launch_is_cheaper(&zeros(&[4096, 4097])));
        assert!(one_launch_is_cheaper(&zeros(&[1, 1, 1, 1, 1])));
    }

    #[test]
    fn without_a_driver_the_reason_is_told() {
        if symbols::driver_available().is_ok() {
            return; // This machine has one; tests/gpu looks at it.
        }
        let cuda = Cuda::default();
        let error = cuda.architectures().map(<[_]>::len).map_err(|error| (error.code(), error.message().to_owned()));
        let (code, text) = error.err().unwrap_or((Code::Internal, String::new()));
        assert_eq!(code, Code::FailedPrecondition);
        assert!(text.contains("libcuda.so.1"), "{text}");
        // Also where a program calls the functions itself, as cust does.
        // SAFETY: every argument is valid for the call.
        assert_eq!(unsafe { cuInit(0) }, symbols::STUB_LIBRARY);
        assert_eq!(text_of_stub(), Some("no CUDA driver on this machine".to_owned()));
    }

    fn text_of_stub() -> Option<String> {
        text(cuGetErrorString, symbols::STUB_LIBRARY)
    }
}
