//! NVIDIA's run-time compiler: found in the running system, and called.
//!
//! Nothing is linked. [`Nvrtc::find`] looks where NVRTC can be (an explicit path, what the process has loaded already,
//! the loader's own search, CUDA directories, wheels beside a Python installation) and takes the first that works; where
//! none does, its error lists every place and what was wrong there. A library once used is never unloaded: it keeps
//! threads and thread-local data of its own.
//!
//! NVRTC may be called from any number of threads at once, each with a program of its own, and that is how the pool uses
//! it. Finding the library touches the file system; compiling does not, apart from NVRTC opening its companion
//! `libnvrtc-builtins` when it compiles for the first time.

use std::borrow::Cow;
use std::collections::HashSet;
use std::env;
use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::fs;
use std::mem::{self, ManuallyDrop};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use super::{Architecture, exit, sys};
use crate::error::{Code, Error, Result};

/// The oldest major version that is used. Older ones know none of the devices from Hopper on.
const OLDEST_MAJOR: i32 = 12;

/// What the loader is asked for by name, in this order.
const SONAMES: [&str; 3] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];

/// Where libraries lie below a CUDA directory, a wheel or a Python prefix.
const LIBRARY_FOLDERS: [&str; 5] = ["", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"];

const INSTALL: &str = "to get one: `pip install nvidia-cuda-nvrtc` (CUDA 13) or `pip install nvidia-cuda-nvrtc-cu12`, \
                       or install the CUDA toolkit; then set OEQ_NVRTC to the library's path if it is still not found";

/// The longest compiler log that is kept, in bytes: head and tail, where the first error and the summary are.
const MAX_LOG_BYTES: usize = 64 << 10;

/// The architecture of the H100 and H200.
const HOPPER: Architecture = Architecture { major: 9, minor: 0 };

/// A small program that uses what kernels use.
const TRIAL: &str = "
__global__ void trial(unsigned long n, float *x, double *y) {
    extern __shared__ float shared[];
    for (unsigned long i = threadIdx.x; i < n; i += blockDim.x) shared[i] = x[i] / y[i];
    __syncwarp();
    atomicAdd(x, __shfl_down_sync(0xffffffffu, shared[threadIdx.x], 1));
    atomicAdd(y, (double)shared[0]);
}
";

/// One thing to compile: a whole program for one architecture.
#[derive(Debug, Clone, Copy)]
pub struct Program<'a> {
    /// What the compiler's messages call the program.
    pub name: &'a str,
    /// CUDA C++ text.
    pub source: &'a str,
    /// What to make machine code for.
    pub architecture: Architecture,
    /// The kernels whose mangled names are wanted, written as in the source.
    pub entry_points: &'a [&'a str],
    /// Options after those of [`options`].
    pub extra_options: &'a [String],
}

/// What compiling gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// A cubin, which is an ELF file with machine code of the one architecture, or NUL-terminated PTX text.
    pub code: Vec<u8>,
    /// For each entry point of the program, in its order, the name that the code knows it by.
    pub symbols: Vec<(String, String)>,
    /// The compiler's messages, empty if it had none.
    pub log: String,
}

/// What an image's code is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImageKind {
    /// Machine code.
    Cubin,
    /// Text that the driver makes machine code of, for devices that the compiler is too old for.
    Ptx,
}

impl ImageKind {
    /// Its name, for files and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cubin => "cubin",
            Self::Ptx => "ptx",
        }
    }
}

impl Image {
    /// What the code is.
    #[must_use]
    pub fn kind(&self) -> ImageKind {
        if self.code.starts_with(b"//") || self.code.starts_with(b".version") {
            ImageKind::Ptx
        } else {
            ImageKind::Cubin
        }
    }
}

/// The options that a program is compiled with, in order. They decide the numbers that a kernel computes, so whoever
/// stores images should store them under these. An `-arch` among the extra ones, such as `-arch=sm_90a`, stands in the
/// place of the architecture's own.
#[must_use]
pub fn options(architecture: Architecture, extra: &[String]) -> Vec<String> {
    let mut options = vec!["--std=c++17".to_owned(), format!("-arch={architecture}"), "--use_fast_math".to_owned()];
    if extra.iter().any(|option| option.starts_with("-arch=")) {
        options.remove(1);
    }
    options.extend_from_slice(extra);
    options
}

/// `nvrtcResult`.
type Status = c_int;
/// `nvrtcProgram`, an opaque handle.
type RawProgram = *mut c_void;
type Strings = *const *const c_char;
/// Called by the compiler now and then, from any thread; 1 stops the compilation, 0 lets it go on.
type FlowCallback = extern "C" fn(*mut c_void, *mut c_void) -> c_int;

const SUCCESS: Status = 0;
const OUT_OF_MEMORY: Status = 1;
const INVALID_OPTION: Status = 5;
const COMPILATION_FAILED: Status = 6;
const BUILTINS_FAILED: Status = 7;
const BAD_NAME_EXPRESSION: Status = 10;

/// The functions of NVRTC, with the types of `nvrtc.h`, which have not changed since version 11.2.
struct Functions {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    error_text: unsafe extern "C" fn(Status) -> *const c_char,
    architecture_count: unsafe extern "C" fn(*mut c_int) -> Status,
    architectures: unsafe extern "C" fn(*mut c_int) -> Status,
    create: unsafe extern "C" fn(*mut RawProgram, *const c_char, *const c_char, c_int, Strings, Strings) -> Status,
    destroy: unsafe extern "C" fn(*mut RawProgram) -> Status,
    add_name: unsafe extern "C" fn(RawProgram, *const c_char) -> Status,
    compile: unsafe extern "C" fn(RawProgram, c_int, Strings) -> Status,
    log_size: unsafe extern "C" fn(RawProgram, *mut usize) -> Status,
    log: unsafe extern "C" fn(RawProgram, *mut c_char) -> Status,
    cubin_size: unsafe extern "C" fn(RawProgram, *mut usize) -> Status,
    cubin: unsafe extern "C" fn(RawProgram, *mut c_char) -> Status,
    ptx_size: unsafe extern "C" fn(RawProgram, *mut usize) -> Status,
    ptx: unsafe extern "C" fn(RawProgram, *mut c_char) -> Status,
    lowered_name: unsafe extern "C" fn(RawProgram, *const c_char, *mut *const c_char) -> Status,
    /// In newer versions (12.9 has it, 12.4 does not); older ones cannot be stopped.
    set_flow_callback: Option<unsafe extern "C" fn(RawProgram, FlowCallback, *mut c_void) -> Status>,
}

impl Functions {
    fn of(library: &Library) -> std::result::Result<Self, String> {
        fn symbol<T: Copy>(library: &Library, name: &CStr) -> std::result::Result<T, String> {
            // SAFETY: only called below, where the field that takes the pointer has the type that nvrtc.h gives the
            // function of that name. The library outlives the pointer: `Nvrtc` never unloads it, and where loading
            // fails half-way the pointers go before the library does.
            let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
            found.map(|symbol| *symbol).map_err(|error| format!("not a usable NVRTC: {error}"))
        }
        Ok(Self {
            version: symbol(library, c"nvrtcVersion")?,
            error_text: symbol(library, c"nvrtcGetErrorString")?,
            architecture_count: symbol(library, c"nvrtcGetNumSupportedArchs")?,
            architectures: symbol(library, c"nvrtcGetSupportedArchs")?,
            create: symbol(library, c"nvrtcCreateProgram")?,
            destroy: symbol(library, c"nvrtcDestroyProgram")?,
            add_name: symbol(library, c"nvrtcAddNameExpression")?,
            compile: symbol(library, c"nvrtcCompileProgram")?,
            log_size: symbol(library, c"nvrtcGetProgramLogSize")?,
            log: symbol(library, c"nvrtcGetProgramLog")?,
            cubin_size: symbol(library, c"nvrtcGetCUBINSize")?,
            cubin: symbol(library, c"nvrtcGetCUBIN")?,
            ptx_size: symbol(library, c"nvrtcGetPTXSize")?,
            ptx: symbol(library, c"nvrtcGetPTX")?,
            lowered_name: symbol(library, c"nvrtcGetLoweredName")?,
            set_flow_callback: symbol(library, c"nvrtcSetFlowCallback").ok(),
        })
    }
}

/// A loaded NVRTC. Any number of threads may compile with it at once.
pub struct Nvrtc {
    functions: Functions,
    version: (i32, i32),
    path: PathBuf,
    architectures: Vec<Architecture>,
    /// For each architecture, whether [`Nvrtc::prepare`] is done with it.
    prepared: Vec<AtomicBool>,
    /// Held for ever, see the module's text.
    _library: ManuallyDrop<Library>,
}

impl fmt::Debug for Nvrtc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvrtc").field("version", &self.version).field("path", &self.path).finish_non_exhaustive()
    }
}

impl Nvrtc {
    /// Finds and loads NVRTC. With an explicit path, a library or a directory that holds one, nothing else is tried.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` if none is usable; the text lists every place that was tried, with the reason.
    pub fn find(explicit: Option<&Path>) -> Result<Self> {
        let mut search = Search::default();
        if let Some(path) = explicit {
            return search.explicit(path).ok_or_else(|| {
                Error::precondition(format!(
                    "{}, given as OEQ_NVRTC, is no usable NVRTC (needed: version {OLDEST_MAJOR} or 13):{}\n{INSTALL}",
                    path.display(),
                    search.failures()
                ))
            });
        }
        search.everywhere(&Surroundings::of_this_process()).ok_or_else(|| {
            Error::precondition(format!(
                "no usable NVRTC, CUDA's run-time compiler, was found (needed: version {OLDEST_MAJOR} or 13). Tried:{}\n\
                 {INSTALL}",
                search.failures()
            ))
        })
    }

    /// Major and minor version, for example (13, 0).
    #[must_use]
    pub const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// The library's file, as the loader knows it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether `--split-compile`, several threads for one program, does anything here. Version 12.0 accepts and ignores
    /// it; 12.4 puts a complaint about it into the log, and does it all the same.
    #[must_use]
    pub const fn splits(&self) -> bool {
        self.version.0 > 12 || self.version.1 >= 1
    }

    /// Every architecture that this NVRTC makes code for, ascending.
    #[must_use]
    pub fn architectures(&self) -> &[Architecture] {
        &self.architectures
    }

    /// Compiles a program: to machine code or, where this NVRTC does not know the architecture but an earlier one, to PTX
    /// for the highest that it knows, which the driver of such a device understands.
    ///
    /// The calling thread's stack is what the compiler recurses on; the pool's workers have enough for the largest
    /// payloads.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the program does not compile, lacks an entry point, or holds a NUL character; the text has
    /// the compiler's log. `UNIMPLEMENTED` if this NVRTC does not know the architecture. `FAILED_PRECONDITION` if NVRTC
    /// lacks its companion library, `RESOURCE_EXHAUSTED` if it ran out of memory, `INTERNAL` for whatever else it
    /// answers.
    pub fn compile(&self, program: &Program<'_>) -> Result<Image> {
        let compiled = self.index_of(program.architecture).and_then(|(index, known)| {
            self.prepare(index)?;
            if known == program.architecture {
                return self.compile_inner(program);
            }
            log::info!(
                "oeq-native: NVRTC {}.{} does not know {}: making PTX for {known}, which the driver finishes",
                self.version.0,
                self.version.1,
                program.architecture
            );
            let virtual_one = [program.extra_options, &[format!("-arch=compute_{}", known.number())]].concat();
            self.compile_inner(&Program { extra_options: &virtual_one, ..*program })
        });
        compiled.map_err(|error| {
            error.context(format_args!(
                "compiling {:?} for {} with NVRTC {}.{} ({})",
                program.name,
                program.architecture,
                self.version.0,
                self.version.1,
                self.path.display()
            ))
        })
    }

    /// Makes sure that the process may end during a compilation for an architecture: see [`exit::watch`]. What NVRTC
    /// registers for exit as late as its first compilation depends on the architecture, so each is tried once, with a
    /// small program that takes a few hundredths of a second.
    ///
    /// Threads that come here together all try. Waiting for one of them would take as long, and need a lock.
    fn prepare(&self, index: usize) -> Result<()> {
        let (Some(&architecture), Some(prepared)) = (self.architectures.get(index), self.prepared.get(index)) else {
            return Err(Error::internal("an architecture outside the list of NVRTC"));
        };
        if !prepared.load(Ordering::Acquire) {
            // For an end of the process during the trial itself: not all that could be wished for, but most of it.
            exit::watch();
            let entry_points = &["trial"];
            self.compile_inner(&Program {
                name: "trial",
                source: TRIAL,
                architecture,
                entry_points,
                extra_options: &[],
            })?;
            exit::watch();
            prepared.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// A library that cannot compile is found out while there are other places to try.
    fn prove(&self) -> std::result::Result<(), String> {
        // Any would do; Hopper is what is most likely asked for next, and saves that a trial of its own.
        let index = self.architectures.iter().position(|&known| known == HOPPER).unwrap_or(0);
        self.prepare(index).map_err(|error| format!("cannot compile: {}", error.message()))
    }

    fn compile_inner(&self, program: &Program<'_>) -> Result<Image> {
        let name = c_string("the program's name", program.name)?;
        let source = c_string("the program", program.source)?;
        let entry_points: Vec<CString> =
            program.entry_points.iter().map(|name| c_string("an entry point's name", name)).collect::<Result<_>>()?;
        let options: Vec<CString> = options(program.architecture, program.extra_options)
            .iter()
            .map(|option| c_string("an option", option))
            .collect::<Result<_>>()?;

        let _running = exit::Running::enter()?;
        let handle = Handle::new(&self.functions, &source, &name)?;
        for entry_point in &entry_points {
            handle.add_name(entry_point)?;
        }
        let status = handle.compile(&options);
        let log = handle.log();
        if status != SUCCESS {
            return Err(if exit::leaving() { exit::ending() } else { self.compile_error(status, &options, &log) });
        }
        let mut symbols = Vec::with_capacity(entry_points.len());
        for (wanted, entry_point) in program.entry_points.iter().zip(&entry_points) {
            symbols.push(((*wanted).to_owned(), handle.lowered_name(entry_point)?));
        }
        let is_virtual = program.extra_options.iter().any(|option| option.starts_with("-arch=compute_"));
        let code = if is_virtual { handle.ptx()? } else { handle.cubin()? };
        Ok(Image { code, symbols, log })
    }

    /// The architecture to compile for, with its place in the list: the wanted one or the highest below it. A suffix in
    /// the options does not change which one that is.
    fn index_of(&self, architecture: Architecture) -> Result<(usize, Architecture)> {
        let below = self.architectures.partition_point(|&known| known <= architecture);
        if let Some((index, known)) =
            below.checked_sub(1).and_then(|index| Some((index, *self.architectures.get(index)?)))
        {
            return Ok((index, known));
        }
        let known: Vec<String> = self.architectures.iter().map(ToString::to_string).collect();
        Err(Error::new(
            Code::Unimplemented,
            format!(
                "this NVRTC does not make code for {architecture}: the lowest it knows is {}, all are {}; an older NVRTC \
                 may know it: `pip install nvidia-cuda-nvrtc-cu12`, with OEQ_NVRTC set to its library",
                known.first().map_or("none", String::as_str),
                known.join(", ")
            ),
        ))
    }

    fn compile_error(&self, status: Status, options: &[CString], log: &str) -> Error {
        let told = self.functions.told(status);
        let log = if log.is_empty() { "(the compiler gave no log)" } else { log };
        // A missing companion is told in the log alone by some versions, with the status of an ordinary failure.
        if status == BUILTINS_FAILED || log.contains("libnvrtc-builtins") {
            let (major, minor) = self.version;
            let folder = self.path.parent().unwrap_or(Path::new("")).display();
            let wheel = if major == 12 { "nvidia-cuda-nvrtc-cu12" } else { "nvidia-cuda-nvrtc" };
            return Error::precondition(format!(
                "{told}: NVRTC could not open its companion libnvrtc-builtins.so.{major}.{minor}, of the same version, \
                 which belongs beside it in {folder}; install NVRTC anew, as a whole: `pip install --force-reinstall \
                 {wheel}`\n{log}"
            ));
        }
        match status {
            INVALID_OPTION => {
                let options: Vec<Cow<'_, str>> = options.iter().map(|option| option.to_string_lossy()).collect();
                Error::invalid(format!("{told}: the options were {}\n{log}", options.join(" ")))
            }
            COMPILATION_FAILED | BAD_NAME_EXPRESSION => {
                Error::invalid(format!("{told}: the program does not compile\n{log}"))
            }
            OUT_OF_MEMORY => Error::new(Code::ResourceExhausted, format!("{told}\n{log}")),
            _ => Error::internal(format!("{told}\n{log}")),
        }
    }
}

impl Functions {
    /// A status as NVRTC names it, with its number.
    fn told(&self, status: Status) -> String {
        // SAFETY: the function takes any number and answers a static, NUL-terminated text; a null pointer is looked for
        // all the same.
        let text = unsafe {
            let text = (self.error_text)(status);
            if text.is_null() { Cow::Borrowed("unknown error") } else { CStr::from_ptr(text).to_string_lossy() }
        };
        format!("{text} ({status})")
    }

    fn check(&self, status: Status, call: &str) -> Result<()> {
        match status {
            SUCCESS => Ok(()),
            OUT_OF_MEMORY => Err(Error::new(Code::ResourceExhausted, format!("{call}: {}", self.told(status)))),
            BAD_NAME_EXPRESSION => Err(Error::invalid(format!("{call}: {}", self.told(status)))),
            _ => Err(Error::internal(format!("{call}: {}", self.told(status)))),
        }
    }
}

/// A program inside NVRTC, destroyed on every path.
struct Handle<'a> {
    functions: &'a Functions,
    raw: RawProgram,
}

impl<'a> Handle<'a> {
    fn new(functions: &'a Functions, source: &CStr, name: &CStr) -> Result<Self> {
        let mut raw = ptr::null_mut();
        // SAFETY: both texts are NUL-terminated and are copied by the call; no headers are passed, so both lists may be
        // null. `raw` is written on success only.
        let status =
            unsafe { (functions.create)(&raw mut raw, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
        functions.check(status, "nvrtcCreateProgram")?;
        let handle = Self { functions, raw };
        if let Some(set) = functions.set_flow_callback {
            // SAFETY: the handle is live; the callback is a plain function that any thread may call at any time and that
            // ignores its arguments. Being refused costs nothing but a longer wait at exit.
            unsafe { set(handle.raw, stop_at_exit, ptr::null_mut()) };
        }
        Ok(handle)
    }

    fn add_name(&self, name: &CStr) -> Result<()> {
        // SAFETY: the handle is live, the text NUL-terminated and copied by the call.
        let status = unsafe { (self.functions.add_name)(self.raw, name.as_ptr()) };
        self.functions.check(status, "nvrtcAddNameExpression")
    }

    fn compile(&self, options: &[CString]) -> Status {
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let Ok(count) = c_int::try_from(pointers.len()) else { return INVALID_OPTION };
        // SAFETY: the handle is live and used by this thread only (it is neither Send nor Sync, for its raw pointer);
        // `pointers` holds `count` NUL-terminated texts that outlive the call.
        unsafe { (self.functions.compile)(self.raw, count, pointers.as_ptr()) }
    }

    /// The compiler's messages. A log that cannot be read is left out, since it only ever explains something else.
    fn log(&self) -> String {
        let log = self.bytes(self.functions.log_size, self.functions.log, "nvrtcGetProgramLog").unwrap_or_default();
        let text = log.split(|&byte| byte == 0).next().unwrap_or_default();
        shortened(String::from_utf8_lossy(text).trim(), MAX_LOG_BYTES).into_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>> {
        let code = self.bytes(self.functions.cubin_size, self.functions.cubin, "nvrtcGetCUBIN")?;
        if !code.starts_with(b"\x7fELF") {
            return Err(Error::internal(format!("nvrtcGetCUBIN gave {} bytes that are not an ELF file", code.len())));
        }
        Ok(code)
    }

    /// The driver takes PTX without a length, so it must end with a NUL.
    fn ptx(&self) -> Result<Vec<u8>> {
        let mut text = self.bytes(self.functions.ptx_size, self.functions.ptx, "nvrtcGetPTX")?;
        if text.last() != Some(&0) {
            text.push(0);
        }
        if !text.windows(8).any(|word| word == b".version") {
            return Err(Error::internal(format!("nvrtcGetPTX gave {} bytes that are not PTX", text.len())));
        }
        Ok(text)
    }

    /// Something that NVRTC hands out in two calls, one for the size in bytes and one for the content.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(RawProgram, *mut usize) -> Status,
        content: unsafe extern "C" fn(RawProgram, *mut c_char) -> Status,
        call: &str,
    ) -> Result<Vec<u8>> {
        let mut length = 0;
        // SAFETY: the handle is live; the size is written through a valid pointer.
        self.functions.check(unsafe { size(self.raw, &raw mut length) }, call)?;
        let mut bytes = vec![0_u8; length];
        // SAFETY: the handle is live and unchanged since the size was asked; the call writes exactly that many bytes.
        self.functions.check(unsafe { content(self.raw, bytes.as_mut_ptr().cast()) }, call)?;
        Ok(bytes)
    }

    fn lowered_name(&self, name: &CStr) -> Result<String> {
        let mut lowered = ptr::null();
        // SAFETY: the handle is live and compiled, the text NUL-terminated. On success NVRTC points `lowered` to a
        // NUL-terminated text that lives as long as the handle; it is copied before that ends.
        unsafe {
            let status = (self.functions.lowered_name)(self.raw, name.as_ptr(), &raw mut lowered);
            self.functions
                .check(status, "nvrtcGetLoweredName")
                .map_err(|error| error.context(format_args!("entry point {name:?}")))?;
            if lowered.is_null() {
                return Err(Error::internal(format!("nvrtcGetLoweredName gave no name for entry point {name:?}")));
            }
            Ok(CStr::from_ptr(lowered).to_string_lossy().into_owned())
        }
    }
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: the handle was made by nvrtcCreateProgram, is destroyed only here, and nothing borrowed from NVRTC
        // outlives it. The status is of no use: there is nothing left to do with a program that cannot be destroyed.
        unsafe { (self.functions.destroy)(&raw mut self.raw) };
    }
}

extern "C" fn stop_at_exit(_payload: *mut c_void, _reserved: *mut c_void) -> c_int {
    c_int::from(exit::leaving())
}

fn c_string(what: &str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|error| {
        Error::invalid(format!(
            "{what} holds a NUL character at byte {}, which ends it for NVRTC",
            error.nul_position()
        ))
    })
}

/// The text with its middle left out if it is longer than `limit` bytes (about: the note on what is left out comes on top).
fn shortened(text: &str, limit: usize) -> Cow<'_, str> {
    if text.len() <= limit {
        return Cow::Borrowed(text);
    }
    let head = (0..=limit / 2).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let tail = (text.len() - limit / 2..=text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len());
    Cow::Owned(format!("{}\n[... {} bytes left out ...]\n{}", &text[..head], tail - head, &text[tail..]))
}

/// What a search has tried so far.
#[derive(Default)]
struct Search {
    /// Place and reason, in order.
    tried: Vec<(String, String)>,
    /// Files tried, without symbolic links, since most places lead to the same few.
    files: HashSet<PathBuf>,
}

impl Search {
    fn failed(&mut self, place: impl Into<String>, reason: impl Into<String>) {
        self.tried.push((place.into(), reason.into()));
    }

    fn failures(&self) -> String {
        use fmt::Write as _;
        self.tried.iter().fold(String::new(), |mut list, (place, reason)| {
            // Writing to a String cannot fail.
            let _ = write!(list, "\n  {place}: {reason}");
            list
        })
    }

    fn explicit(&mut self, path: &Path) -> Option<Nvrtc> {
        // Without this a bare file name would send the loader on a search of its own.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        match fs::metadata(&path) {
            Err(error) => {
                self.failed(path.display().to_string(), error.to_string());
                None
            }
            Ok(data) if data.is_dir() => {
                let folders: Vec<PathBuf> = existing(LIBRARY_FOLDERS.iter().map(|below| path.join(below)));
                folders.iter().find_map(|folder| self.folder(folder))
            }
            Ok(_) => self.file(&path),
        }
    }

    fn everywhere(&mut self, around: &Surroundings<'_>) -> Option<Nvrtc> {
        self.loaded()
            .or_else(|| SONAMES.iter().find_map(|name| self.named(name)))
            .or_else(|| cuda_folders(around).iter().find_map(|folder| self.folder(folder)))
            .or_else(|| wheel_folders(around).iter().find_map(|folder| self.folder(folder)))
    }

    /// What the process has loaded already, by whatever path: a second NVRTC beside it would be memory for nothing.
    fn loaded(&mut self) -> Option<Nvrtc> {
        let maps = fs::read("/proc/self/maps").unwrap_or_default();
        let files = loaded_files(&maps);
        if files.is_empty() {
            self.failed("already loaded in this process", "no libnvrtc.so");
        }
        files.iter().find_map(|file| self.file(file))
    }

    fn named(&mut self, name: &str) -> Option<Nvrtc> {
        let found = load(OsStr::new(name));
        self.note(&format!("{name} (the loader's search)"), found)
    }

    /// All NVRTC libraries of one directory, the best version first.
    fn folder(&mut self, folder: &Path) -> Option<Nvrtc> {
        match libraries_in(folder) {
            Err(error) => {
                self.failed(folder.display().to_string(), error.to_string());
                None
            }
            Ok(files) if files.is_empty() => {
                self.failed(folder.display().to_string(), "holds no libnvrtc.so");
                None
            }
            Ok(files) => files.iter().find_map(|file| self.file(file)),
        }
    }

    fn file(&mut self, file: &Path) -> Option<Nvrtc> {
        let real = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        if !self.files.insert(real) {
            return None;
        }
        let found = load(file.as_os_str());
        self.note(&file.display().to_string(), found)
    }

    fn note(&mut self, place: &str, found: std::result::Result<Nvrtc, String>) -> Option<Nvrtc> {
        match found {
            Ok(nvrtc) => {
                log::debug!("oeq-native: NVRTC {}.{} at {place}", nvrtc.version.0, nvrtc.version.1);
                Some(nvrtc)
            }
            Err(reason) => {
                log::debug!("oeq-native: no NVRTC at {place}: {reason}");
                self.failed(place, reason);
                None
            }
        }
    }
}

/// Opens a library, by path or by name, and makes sure that it is an NVRTC that can be used.
fn load(name: &OsStr) -> std::result::Result<Nvrtc, String> {
    // SAFETY: this runs the initialisers of a library that calls itself NVRTC, or that the user named as NVRTC; NVIDIA's
    // may be loaded at any time and from any thread.
    let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| error.to_string())?;
    let functions = Functions::of(&library)?;

    let (mut major, mut minor) = (0, 0);
    // SAFETY: two valid pointers to int.
    let status = unsafe { (functions.version)(&raw mut major, &raw mut minor) };
    if status != SUCCESS {
        return Err(format!("nvrtcVersion: {}", functions.told(status)));
    }
    if major < OLDEST_MAJOR {
        return Err(format!("this is NVRTC {major}.{minor}, which is too old: needed is {OLDEST_MAJOR} or 13"));
    }

    let architectures = supported(&functions)?;
    let path = sys::file_of(functions.version as *const c_void).unwrap_or_else(|| PathBuf::from(name));
    preload_builtins(&path, (major, minor));
    let prepared = architectures.iter().map(|_| AtomicBool::new(false)).collect();
    let nvrtc = Nvrtc {
        functions,
        version: (major, minor),
        path,
        architectures,
        prepared,
        _library: ManuallyDrop::new(library),
    };
    nvrtc.prove()?;
    Ok(nvrtc)
}

fn supported(functions: &Functions) -> std::result::Result<Vec<Architecture>, String> {
    let mut count = 0;
    // SAFETY: a valid pointer to int.
    let status = unsafe { (functions.architecture_count)(&raw mut count) };
    if status != SUCCESS {
        return Err(format!("nvrtcGetNumSupportedArchs: {}", functions.told(status)));
    }
    let mut numbers: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the call writes as many ints as the one above said, which is the length of the buffer.
    let status = unsafe { (functions.architectures)(numbers.as_mut_ptr()) };
    if status != SUCCESS {
        return Err(format!("nvrtcGetSupportedArchs: {}", functions.told(status)));
    }
    let known = numbers.into_iter().filter_map(|number| Architecture::from_number(u32::try_from(number).ok()?));
    let mut known: Vec<Architecture> = known.collect();
    known.sort_unstable();
    known.dedup();
    Ok(known)
}

/// Opens NVRTC's companion by its full path if it lies beside it. NVRTC asks for it by bare name when it first compiles,
/// and finds what is loaded already. Its own search looks beside the path that it was opened by, which is the wrong
/// place where that path is a symbolic link.
fn preload_builtins(nvrtc: &Path, (major, minor): (i32, i32)) {
    let real = fs::canonicalize(nvrtc);
    let folders = [nvrtc.parent(), real.as_deref().ok().and_then(Path::parent)];
    let files = folders.into_iter().flatten().map(|at| at.join(format!("libnvrtc-builtins.so.{major}.{minor}")));
    let Some(file) = { files }.find(|file| file.is_file()) else { return };
    // SAFETY: the companion holds data and has no initialisers that could do harm; NVRTC itself loads it at any time.
    match unsafe { Library::open(Some(&file), RTLD_NOW | RTLD_GLOBAL) } {
        // Kept loaded for ever, like NVRTC.
        Ok(library) => mem::forget(library),
        // Not an error yet: NVRTC may find it elsewhere, and compiling says clearly if it does not.
        Err(error) => log::debug!("oeq-native: {}: {error}", file.display()),
    }
}

/// The version in the name of an NVRTC library, empty for a plain `libnvrtc.so`; `None` for any other file.
fn version_in_name(name: &OsStr) -> Option<Vec<u32>> {
    let rest = name.to_str()?.strip_prefix("libnvrtc.so")?;
    if rest.is_empty() {
        return Some(Vec::new());
    }
    rest.strip_prefix('.')?.split('.').map(|part| part.parse().ok()).collect()
}

/// The NVRTC libraries of a directory, the highest version first and the unversioned name last.
fn libraries_in(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut found: Vec<(Vec<u32>, PathBuf)> = fs::read_dir(folder)?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter_map(|path| Some((version_in_name(path.file_name()?)?, path)))
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// The NVRTC libraries that a `/proc/self/maps` text names, each once, the highest version first.
fn loaded_files(maps: &[u8]) -> Vec<PathBuf> {
    use std::os::unix::ffi::OsStrExt as _;
    let mut found: Vec<(Vec<u32>, PathBuf)> = maps
        .split(|&byte| byte == b'\n')
        .filter_map(|line| Some(Path::new(OsStr::from_bytes(&line[line.iter().position(|&byte| byte == b'/')?..]))))
        .filter_map(|path| Some((version_in_name(path.file_name()?)?, path.to_owned())))
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.dedup();
    found.into_iter().map(|(_, path)| path).collect()
}

/// What the search depends on outside this module.
struct Surroundings<'a> {
    variable: &'a dyn Fn(&str) -> Option<OsString>,
    /// Where CUDA toolkits are installed, one folder each.
    toolkits: PathBuf,
    /// The running program: as it was called, and without symbolic links.
    programs: Vec<PathBuf>,
    /// The file that this code lies in.
    own_file: Option<PathBuf>,
}

impl Surroundings<'_> {
    fn of_this_process() -> Self {
        let called = env::args_os().next().map(PathBuf::from).filter(|path| path.components().count() > 1);
        let own = sys::file_of(Nvrtc::find as *const c_void).and_then(|file| fs::canonicalize(file).ok());
        Self {
            variable: &|name| env::var_os(name).filter(|value| !value.is_empty()),
            toolkits: PathBuf::from("/usr/local"),
            programs: called.into_iter().chain(env::current_exe()).collect(),
            own_file: own,
        }
    }

    fn folder(&self, variable: &str) -> Option<PathBuf> {
        (self.variable)(variable).map(PathBuf::from)
    }
}

/// The directories of CUDA toolkits in which NVRTC can lie, that exist.
fn cuda_folders(around: &Surroundings<'_>) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| around.folder(name)).collect();
    roots.extend(sorted_children(&around.toolkits, |name| name.starts_with("cuda")));
    existing(roots.iter().flat_map(|root| LIBRARY_FOLDERS[1..].iter().map(move |below| root.join(below))))
}

/// The library directories of NVIDIA's wheels beside the Python installations that can be ours, that exist.
fn wheel_folders(around: &Surroundings<'_>) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = Vec::new();
    prefixes.extend(["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(|name| around.folder(name)));
    prefixes.extend(around.programs.iter().filter_map(|program| prefix_of(program)));
    let on_path = (around.variable)("PATH").and_then(|path| {
        env::split_paths(&path).map(|folder| folder.join("python3")).find(|program| program.is_file())
    });
    if let Some(python) = on_path {
        let real = fs::canonicalize(&python).ok();
        prefixes.extend(prefix_of(&python));
        prefixes.extend(real.and_then(|python| prefix_of(&python)));
    }
    prefixes.extend(around.folder("HOME").map(|home| home.join(".local")));

    let mut packages: Vec<PathBuf> = Vec::new();
    let mut folders: Vec<PathBuf> = Vec::new();
    for prefix in &prefixes {
        // Conda puts its own builds of NVRTC beside Python's libraries, not into packages.
        folders.extend(
            LIBRARY_FOLDERS[1..]
                .iter()
                .map(|below| prefix.join(below))
                .filter(|folder| libraries_in(folder).is_ok_and(|files| !files.is_empty())),
        );
        for below in ["lib", "lib64"] {
            for python in sorted_children(&prefix.join(below), |name| name.starts_with("python3")) {
                packages.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
            }
        }
    }
    let is_packages = |folder: &&Path| folder.ends_with("site-packages") || folder.ends_with("dist-packages");
    packages.extend(around.own_file.iter().flat_map(|own| own.ancestors().filter(is_packages).map(Path::to_owned)));

    for package in existing(packages) {
        let wheels = sorted_children(&package.join("nvidia"), |_| true).into_iter().map(|wheel| wheel.join("lib"));
        let mut with_nvrtc: Vec<PathBuf> =
            wheels.filter(|folder| libraries_in(folder).is_ok_and(|files| !files.is_empty())).collect();
        if with_nvrtc.is_empty() {
            // Named all the same, so that an error shows that these packages were looked at.
            with_nvrtc.push(package.join("nvidia/cu13/lib"));
        }
        folders.extend(with_nvrtc);
    }
    let mut seen = HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// `/prefix` of `/prefix/bin/program`.
fn prefix_of(program: &Path) -> Option<PathBuf> {
    Some(program.parent()?.parent()?.to_owned()).filter(|prefix| !prefix.as_os_str().is_empty())
}

/// The entries of a directory whose name is wanted, in falling order of name with numbers compared as numbers.
fn sorted_children(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let name = name.to_str().filter(|name| wanted(name))?;
            let numbers = name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
            Some((numbers, entry.path()))
        })
        .collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    found.into_iter().map(|(_, path)| path).collect()
}

fn existing(folders: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    let mut seen = HashSet::new();
    folders.into_iter().filter(|folder| folder.is_dir() && seen.insert(folder.clone())).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// A directory of its own for one test, removed at its end.
    struct Tree(PathBuf);

    impl Tree {
        fn new() -> Self {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let number = COUNT.fetch_add(1, Ordering::Relaxed);
            let root = env::temp_dir().join(format!("oeq-native-nvrtc-{}-{number}", std::process::id()));
            fs::create_dir(&root).unwrap();
            Self(root)
        }

        fn path(&self, below: &str) -> PathBuf {
            self.0.join(below)
        }

        fn file(&self, below: &str) -> PathBuf {
            let path = self.path(below);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "not a library").unwrap();
            path
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// Surroundings below a tree; the variables are paths in it.
    fn around<'a>(tree: &Tree, variable: &'a dyn Fn(&str) -> Option<OsString>) -> Surroundings<'a> {
        Surroundings { variable, toolkits: tree.path("local"), programs: Vec::new(), own_file: None }
    }

    #[test]
    fn the_options_are_those_that_fix_the_numbers_and_then_the_extra_ones() {
        let extra = ["--split-compile=0".to_owned()];
        let options = options(Architecture { major: 9, minor: 0 }, &extra);
        assert_eq!(options, ["--std=c++17", "-arch=sm_90", "--use_fast_math", "--split-compile=0"]);
    }

    #[test]
    fn names_of_libraries_are_told_from_others() {
        let version = |name: &str| version_in_name(OsStr::new(name));
        assert_eq!(version("libnvrtc.so"), Some(vec![]));
        assert_eq!(version("libnvrtc.so.13"), Some(vec![13]));
        assert_eq!(version("libnvrtc.so.12.4.127"), Some(vec![12, 4, 127]));
        let others = [
            "libnvrtc-builtins.so.13.5",
            "libnvrtc.alt.so.12",
            "libnvrtc.so.13 (deleted)",
            "libnvrtc.so.",
            "nvrtc",
            "libnvrtc.so.x",
            "libnvrtc.sox",
        ];
        for name in others {
            assert_eq!(version(name), None, "{name}");
        }
    }

    #[test]
    fn the_highest_version_of_a_directory_comes_first() {
        let tree = Tree::new();
        for name in ["libnvrtc.so", "libnvrtc.so.9", "libnvrtc.so.13", "libnvrtc.so.12.4.127", "libnvrtc.alt.so.13"] {
            tree.file(name);
        }
        let names = ["libnvrtc.so.13", "libnvrtc.so.12.4.127", "libnvrtc.so.9", "libnvrtc.so"];
        assert_eq!(libraries_in(&tree.0).unwrap(), names.map(|name| tree.path(name)));
    }

    #[test]
    fn what_is_loaded_is_read_from_the_map_once_each() {
        let maps = b"7f00-7f01 r-xp 00000000 08:01 42      /a b/libnvrtc.so.12\n\
                     7f01-7f02 r--p 00001000 08:01 42      /a b/libnvrtc.so.12\n\
                     7f02-7f03 r-xp 00000000 08:01 43      /c/libnvrtc.so.13\n\
                     7f03-7f04 r-xp 00000000 08:01 44      /d/libnvrtc.so.13 (deleted)\n\
                     7f04-7f05 r-xp 00000000 08:01 45      /c/libnvrtc-builtins.so.13.5\n\
                     7f05-7f06 rw-p 00000000 00:00 0\n\
                     7ffd-7fff rw-p 00000000 00:00 0       [stack]\n";
        assert_eq!(loaded_files(maps), [Path::new("/c/libnvrtc.so.13"), Path::new("/a b/libnvrtc.so.12")]);
    }

    #[test]
    fn toolkits_are_looked_at_as_told_and_then_newest_first() {
        let tree = Tree::new();
        for folder in ["mine/lib64", "local/cuda-12.9/lib64", "local/cuda-13.0/targets/x86_64-linux/lib", "local/bin"] {
            fs::create_dir_all(tree.path(folder)).unwrap();
        }
        symlink(tree.path("local/cuda-13.0"), tree.path("local/cuda")).unwrap();
        let mine = tree.path("mine").into_os_string();
        let variable = |name: &str| (name == "CUDA_PATH").then(|| mine.clone());
        let expected = [
            "mine/lib64",
            "local/cuda-13.0/targets/x86_64-linux/lib",
            "local/cuda-12.9/lib64",
            "local/cuda/targets/x86_64-linux/lib",
        ];
        assert_eq!(cuda_folders(&around(&tree, &variable)), expected.map(|folder| tree.path(folder)));
    }

    #[test]
    fn wheels_are_found_beside_every_python() {
        let tree = Tree::new();
        let packages = |prefix: &str| format!("{prefix}/lib/python3.11/site-packages");
        tree.file(&format!("{}/nvidia/cu13/lib/libnvrtc.so.13", packages("venv")));
        tree.file(&format!("{}/nvidia/cublas/lib/libcublas.so.13", packages("venv")));
        tree.file("conda/lib/libnvrtc.so.12");
        tree.file(&format!("{}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", packages("running")));
        tree.file(&format!("{}/nvidia/cu13/lib/libnvrtc.so.13", packages("real")));
        tree.file("real/bin/python3.11");
        fs::create_dir_all(tree.path("path/bin")).unwrap();
        symlink(tree.path("real/bin/python3.11"), tree.path("path/bin/python3")).unwrap();
        tree.file("own/site-packages/nvidia/cu13/lib/libnvrtc.so.13");
        let own = tree.file("own/site-packages/oeq/liboeq_native.so");

        let path = env::join_paths([tree.path("nowhere"), tree.path("path/bin")]).unwrap();
        let variable = |name: &str| match name {
            "VIRTUAL_ENV" => Some(tree.path("venv").into_os_string()),
            "CONDA_PREFIX" => Some(tree.path("conda").into_os_string()),
            "PATH" => Some(path.clone()),
            _ => None,
        };
        let mut around = around(&tree, &variable);
        around.programs = vec![tree.path("running/bin/python"), PathBuf::from("python")];
        around.own_file = Some(own);
        let found: HashSet<PathBuf> = wheel_folders(&around).into_iter().collect();
        let expected = [
            "conda/lib".to_owned(),
            format!("{}/nvidia/cu13/lib", packages("venv")),
            format!("{}/nvidia/cuda_nvrtc/lib", packages("running")),
            format!("{}/nvidia/cu13/lib", packages("real")),
            "own/site-packages/nvidia/cu13/lib".to_owned(),
        ];
        assert_eq!(found, expected.iter().map(|folder| tree.path(folder)).collect());
    }

    #[test]
    fn a_search_goes_through_everything_and_remembers_why_it_failed() {
        let tree = Tree::new();
        let broken = tree.file("local/cuda-13.0/lib64/libnvrtc.so.13");
        symlink(&broken, tree.path("local/cuda-13.0/lib64/libnvrtc.so")).unwrap();
        let empty = "venv/lib/python3.11/site-packages";
        fs::create_dir_all(tree.path(empty)).unwrap();
        let venv = tree.path("venv").into_os_string();
        let variable = |name: &str| (name == "VIRTUAL_ENV").then(|| venv.clone());
        let mut search = Search::default();
        let around = around(&tree, &variable);
        // Only the places below the tree: what the machine itself has is not this test's business.
        let folders = [cuda_folders(&around), wheel_folders(&around)].concat();
        assert!(folders.iter().find_map(|folder| search.folder(folder)).is_none());
        let told = search.failures();
        assert_eq!(told.matches(broken.to_str().unwrap()).count(), 2, "once as the place, once by the loader: {told}");
        assert!(told.contains("file too short") || told.contains("invalid ELF header"), "{told}");
        assert!(told.contains(&format!("{empty}/nvidia/cu13/lib: No such file")), "{told}");
    }

    #[test]
    fn an_explicit_path_that_does_not_work_is_an_error_with_the_reason() {
        let tree = Tree::new();
        let broken = tree.file("broken/libnvrtc.so.13");
        fs::create_dir(tree.path("empty")).unwrap();
        let libc = sys::file_of(libc::getpid as *const c_void).unwrap();
        let cases = [
            (tree.path("missing"), "No such file"),
            (tree.path("empty"), "holds no libnvrtc.so"),
            (broken.clone(), "libnvrtc.so.13"),
            (tree.path("broken"), "libnvrtc.so.13"),
            (libc, "nvrtcVersion"),
        ];
        for (path, reason) in cases {
            let error = Nvrtc::find(Some(&path)).unwrap_err();
            assert_eq!(error.code(), Code::FailedPrecondition);
            for part in [path.to_str().unwrap(), reason, "OEQ_NVRTC", "pip install nvidia-cuda-nvrtc"] {
                assert!(error.message().contains(part), "{part:?} is not in: {error}");
            }
        }
    }

    #[test]
    fn a_long_log_keeps_its_head_and_its_tail() {
        assert!(matches!(shortened("short", 5), Cow::Borrowed("short")));
        let log = format!("first{}last", "x".repeat(1000));
        let short = shortened(&log, 100);
        assert!(short.starts_with("first") && short.ends_with("last") && short.len() < 150, "{short}");
        assert!(short.contains("[... 909 bytes left out ...]"), "{short}");
        // Cuts fall inside characters here, and must move away from them.
        let wide = shortened(&"\u{20ac}".repeat(100), 101).into_owned();
        assert!(wide.starts_with('\u{20ac}') && wide.ends_with('\u{20ac}') && wide.len() < 150, "{wide}");
    }

    #[test]
    fn a_nul_character_is_refused_with_its_place() {
        let error = c_string("the program", "ab\0c").unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("the program holds a NUL character at byte 2"), "{error}");
    }
}
