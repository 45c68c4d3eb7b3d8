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
    /// A cubin: an ELF file with machine code of the one architecture.
    pub code: Vec<u8>,
    /// For each entry point of the program, in its order, the name that the cubin knows it by.
    pub symbols: Vec<(String, String)>,
    /// The compiler's messages, empty if it had none.
    pub log: String,
}

/// The options that a program is compiled with, in order. They decide the numbers that a kernel computes, so whoever
/// stores images should store them under these.
#[must_use]
pub fn options(architecture: Architecture, extra: &[String]) -> Vec<String> {
    let mut options = vec!["--std=c++17".to_owned(), format!("-arch={architecture}"), "--use_fast_math".to_owned()];
    options.extend_from_slice(extra);
    options
}

/// `nvrtcResult`.
type Status = c_int;
/// `nvrtcProgram`, an opaque handle.
type RawProgram = *mut c_void;
type Strings = *const *const c_char;

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
    lowered_name: unsafe extern "C" fn(RawProgram, *const c_char, *mut *const c_char) -> Status,
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
            lowered_name: symbol(library, c"nvrtcGetLoweredName")?,
        })
    }
}

/// A loaded NVRTC. Any number of threads may compile with it at once.
pub struct Nvrtc {
    functions: Functions,
    version: (i32, i32),
    path: PathBuf,
    architectures: Vec<Architecture>,
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
                    "OEQ_NVRTC names {}, which is not a usable NVRTC (needed: version {OLDEST_MAJOR} or 13):{}\n{INSTALL}",
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

    /// Every architecture that this NVRTC makes code for, ascending.
    #[must_use]
    pub fn architectures(&self) -> &[Architecture] {
        &self.architectures
    }

    /// Compiles a program to machine code.
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
        self.compile_inner(program).map_err(|error| {
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

    /// Compiles an almost empty program, a few hundredths of a second: a library without its companion is found out while
    /// there are other places to try, and what NVRTC registers for exit is registered before ours.
    fn prove(&self) -> std::result::Result<(), String> {
        let Some(&architecture) = self.architectures.last() else {
            return Err("knows no architecture".to_owned());
        };
        let source = "__global__ void trial() {}";
        let program = Program { name: "trial", source, architecture, entry_points: &["trial"], extra_options: &[] };
        self.compile_inner(&program).map(drop).map_err(|error| error.to_string())
    }

    fn compile_inner(&self, program: &Program<'_>) -> Result<Image> {
        self.check_architecture(program.architecture)?;
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
            return Err(self.compile_error(status, &options, &log));
        }
        let mut symbols = Vec::with_capacity(entry_points.len());
        for (wanted, entry_point) in program.entry_points.iter().zip(&entry_points) {
            symbols.push(((*wanted).to_owned(), handle.lowered_name(entry_point)?));
        }
        Ok(Image { code: handle.cubin()?, symbols, log })
    }

    fn check_architecture(&self, architecture: Architecture) -> Result<()> {
        if self.architectures.binary_search(&architecture).is_ok() {
            return Ok(());
        }
        let known: Vec<String> = self.architectures.iter().map(ToString::to_string).collect();
        let highest = known.last().map_or("none", String::as_str);
        let advice = if self.architectures.last().is_some_and(|&last| architecture > last) {
            "a newer NVRTC may know it: `pip install --upgrade nvidia-cuda-nvrtc`"
        } else {
            "an older NVRTC may know it: `pip install nvidia-cuda-nvrtc-cu12`, with OEQ_NVRTC set to its library"
        };
        Err(Error::new(
            Code::Unimplemented,
            format!(
                "this NVRTC does not make code for {architecture}: the highest it knows is {highest}, all are {}; {advice}",
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
            return Error::precondition(format!(
                "{told}: NVRTC could not open its companion libnvrtc-builtins.so.{major}.{minor}, of the same version, \
                 which belongs beside it in {folder}; reinstall NVRTC as a whole, {INSTALL}\n{log}"
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
        Ok(Self { functions, raw })
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
            Ok(data) if data.is_dir() => LIBRARY_FOLDERS.iter().find_map(|below| self.folder(&path.join(below))),
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
    let nvrtc = Nvrtc { functions, version: (major, minor), path, architectures, _library: ManuallyDrop::new(library) };
    nvrtc.prove()?;
    exit::watch();
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
