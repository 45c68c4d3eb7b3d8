//! The system's C++ compiler, for the host platform: it makes a shared library of a payload's source and a header of ours
//! (`kernels/host/oeq_host.h`).
//!
//! The compiler is started directly, without a shell, with arguments that are all our own: the payload's text goes into a
//! file of a directory that only this user can enter, under a name that does not depend on it.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use super::{Architecture, Compiler, CompilerIdentity, Image, Program, exit};
use crate::error::{Code, Error, Result};
use crate::source::host::for_host;
use crate::sync::OfProcess;

/// The built-ins of CUDA that payloads use.
const HEADER: &str = include_str!("../../kernels/host/oeq_host.h");

/// What is looked for in `PATH`, in this order.
const COMPILERS: [&str; 3] = ["c++", "g++", "clang++"];

/// The memory that a warp's lanes run in, bytes: its size, to which it is aligned, where the first stack begins, and the
/// bytes of one stack with the inaccessible page below it. Part of what an image means, so told to the compiler.
pub(crate) const REGION: usize = 8 << 20;
/// See [`REGION`].
pub(crate) const STACKS: usize = 64 << 10;
/// See [`REGION`].
pub(crate) const STACK: usize = 240 << 10;
/// The most that a kernel may take of a stack, bytes; the compiler refuses a larger one.
const MAX_FRAME: usize = 160 << 10;

const INSTALL: &str = "the host platform compiles kernels with the system's C++ compiler; to get one: `apt install g++`, \
                       `dnf install gcc-c++` or `conda install gxx`; or set OEQ_CXX to a compiler's path";

/// How much of the compiler's messages is kept, bytes.
const MAX_LOG_BYTES: u64 = 64 << 10;

/// The options that a program is compiled with. They and the header decide what an image is.
#[must_use]
pub fn options(extra: &[String]) -> Vec<String> {
    // Frames are bounded because stacks are; no strict aliasing, because kernels read shared memory under several types.
    let mut options: Vec<String> = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden"]
        .into_iter()
        .chain(["-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=fast"])
        .map(str::to_owned)
        .collect();
    if cfg!(target_arch = "x86_64") {
        // A change of lanes pushes below the stack pointer. Long double is double to CUDA, and payloads write constants
        // in it.
        options.extend(["-mno-red-zone", "-mlong-double-64"].map(str::to_owned));
    }
    options.push(format!("-DOEQ_HOST_REGION={REGION}"));
    options.push(format!("-DOEQ_HOST_STACKS={STACKS}"));
    options.push(format!("-DOEQ_HOST_STACK={STACK}"));
    options.push(format!("-Werror=frame-larger-than={MAX_FRAME}"));
    options.extend_from_slice(extra);
    options
}

/// What an image depends on besides the payload and the compiler's version, for those who store images: the processor's
/// kind, the options and the header.
pub(crate) fn dependencies() -> impl Iterator<Item = String> {
    [std::env::consts::ARCH.to_owned(), HEADER.to_owned()].into_iter().chain(options(&[]))
}

/// A C++ compiler that answered.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    path: PathBuf,
    /// The first line of what it says about itself.
    version: String,
}

impl Found {
    fn identity(&self) -> CompilerIdentity {
        // What every compiler ends the line or a word of it with: `12.2.0`.
        let number = |word: &str| {
            let mut parts = word.split('.').map(str::parse);
            Some((parts.next()?.ok()?, parts.next()?.ok()?))
        };
        let version = self.version.split_whitespace().rev().find_map(number).unwrap_or_default();
        CompilerIdentity { version, library: fs::canonicalize(&self.path).unwrap_or_else(|_| self.path.clone()) }
    }
}

/// The system's C++ compiler, found when it is first needed. That none was found is not remembered.
#[derive(Debug)]
pub struct HostCompiler {
    explicit: Option<PathBuf>,
    found: OfProcess<Mutex<Option<Found>>>,
}

impl HostCompiler {
    /// A compiler that uses `explicit`, a path or a name in `PATH`, or searches for one.
    #[must_use]
    pub fn new(explicit: Option<PathBuf>) -> Self {
        Self { explicit, found: OfProcess::default() }
    }

    fn compiler(&self) -> Result<Found> {
        self.found.with(|found| {
            if let Some(found) = found {
                return Ok(found.clone());
            }
            let new = match &self.explicit {
                Some(explicit) => find(explicit.as_os_str()).map_err(|reason| {
                    Error::precondition(format!(
                        "{}, given as OEQ_CXX, is no usable C++ compiler: {reason}\n{INSTALL}",
                        explicit.display()
                    ))
                }),
                None => everywhere(),
            }?;
            log::info!("oeq-native: C++ compiler {} ({})", new.path.display(), new.version);
            Ok(found.insert(new).clone())
        })
    }
}

fn everywhere() -> Result<Found> {
    let mut tried = String::new();
    for name in COMPILERS {
        match find(OsStr::new(name)) {
            Ok(found) => return Ok(found),
            Err(reason) => {
                let _ = write!(tried, "\n  {name}: {reason}");
            }
        }
    }
    Err(Error::precondition(format!("no usable C++ compiler was found. Tried:{tried}\n{INSTALL}")))
}

/// A compiler by its path or its name in `PATH`, if it runs.
fn find(name: &OsStr) -> std::result::Result<Found, String> {
    let path = if Path::new(name).components().count() > 1 {
        std::path::absolute(name).map_err(|error| error.to_string())?
    } else {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        // An empty entry of PATH would mean the working directory, which is not ours to trust.
        std::env::split_paths(&folders)
            .filter(|folder| folder.is_absolute())
            .map(|folder| folder.join(name))
            .find(|path| path.is_file())
            .ok_or("not in PATH")?
    };
    let answer = Command::new(&path)
        .arg("--version")
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| format!("{}: {error}", path.display()))?;
    if !answer.status.success() {
        return Err(format!("{} --version: {}", path.display(), answer.status));
    }
    let text = String::from_utf8_lossy(&answer.stdout);
    Ok(Found { path, version: text.lines().next().unwrap_or_default().trim().to_owned() })
}

/// A directory that nobody else can enter, removed with all that is in it when dropped.
#[derive(Debug)]
pub(crate) struct PrivateFolder(PathBuf);

impl PrivateFolder {
    pub(crate) fn new() -> Result<Self> {
        let parent = std::env::temp_dir();
        let mut builder = DirBuilder::new();
        builder.mode(0o700);
        loop {
            // The name need not be secret: a directory that is there already, whoever made it, is never used.
            let number = ahash::RandomState::new().hash_one(std::process::id());
            let path = parent.join(format!("oeq-native-{number:016x}"));
            match builder.create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(Error::precondition(format!(
                        "no temporary directory can be made in {} (set TMPDIR to a place where it can): {error}",
                        parent.display()
                    )));
                }
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a file of that name.
    pub(crate) fn write(&self, name: &str, content: &[u8]) -> Result<PathBuf> {
        let path = self.0.join(name);
        fs::write(&path, content).map_err(|error| file_error(&path, &error))?;
        Ok(path)
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            log::debug!("oeq-native: {} stays: {error}", self.0.display());
        }
    }
}

fn file_error(path: &Path, error: &io::Error) -> Error {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Code::ResourceExhausted,
        _ => Code::FailedPrecondition,
    };
    Error::new(code, format!("{}: {error}", path.display()))
}

/// The symbol under which an image has its entry point of that index.
fn symbol(index: usize) -> String {
    format!("oeq_host_{index}")
}

/// The whole text that the compiler gets.
fn text_of(program: &Program<'_>) -> Result<String> {
    let identifier = |name: &str| {
        !name.starts_with(|first: char| first.is_ascii_digit())
            && !name.is_empty()
            && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    if let Some(name) = program.entry_points.iter().find(|name| !identifier(name)) {
        return Err(Error::invalid(format!("entry point `{name}` is not a name of C++")));
    }
    let name: String = program
        .name
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() || letter == '.' { letter } else { '_' })
        .collect();
    let mut text = format!("#line 1 \"oeq_host.h\"\n{HEADER}\n#line 1 \"{name}\"\n{}\n", for_host(program.source)?);
    for (index, entry) in program.entry_points.iter().enumerate() {
        let _ = writeln!(text, "OEQ_HOST_EXPORT({}, {entry})", symbol(index));
    }
    Ok(text)
}

impl Compiler for HostCompiler {
    fn compile(&self, program: &Program<'_>) -> Result<Image> {
        if program.architecture != Architecture::HOST {
            return Err(Error::internal(format!("{} is not the host's architecture", program.architecture)));
        }
        let compiler = self.compiler()?;
        let folder = PrivateFolder::new()?;
        folder.write("kernel.cpp", text_of(program)?.as_bytes())?;
        let log_path = folder.path().join("log");
        let messages = File::create(&log_path).map_err(|error| file_error(&log_path, &error))?;
        let _running = exit::Running::enter()?;
        exit::watch();
        let arguments = options(program.extra_options);
        let mut child = Command::new(&compiler.path)
            .args(&arguments)
            .args(["kernel.cpp", "-o", "kernel.so"])
            .current_dir(folder.path())
            .env("TMPDIR", folder.path())
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(messages)
            .spawn()
            .map_err(|error| Error::precondition(format!("{}: {error}", compiler.path.display())))?;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if exit::leaving() => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(exit::ending());
                }
                Ok(None) => thread::sleep(Duration::from_millis(2)),
                Err(error) => {
                    return Err(Error::internal(format!(
                        "waiting for {}: {error} (does this process ignore SIGCHLD?)",
                        compiler.path.display()
                    )));
                }
            }
        };
        let mut log = Vec::new();
        let _ = File::open(&log_path).and_then(|file| file.take(MAX_LOG_BYTES).read_to_end(&mut log));
        let log = String::from_utf8_lossy(&log).into_owned();
        if !status.success() {
            return Err(Error::invalid(format!(
                "{} ({}), {status}: the program does not compile for the host\n{log}",
                compiler.path.display(),
                compiler.version
            )));
        }
        let image = folder.path().join("kernel.so");
        let code = fs::read(&image).map_err(|error| file_error(&image, &error))?;
        let entries = program.entry_points.iter().enumerate();
        Ok(Image { code, symbols: entries.map(|(index, entry)| ((*entry).to_owned(), symbol(index))).collect(), log })
    }

    fn available(&self) -> Result<()> {
        self.compiler().map(|_| ())
    }

    fn search(&self) -> Option<String> {
        Some(format!("C++ {:?} {:?}", self.explicit, std::env::var_os("PATH").unwrap_or_default()))
    }

    fn identify(&self) -> Result<CompilerIdentity> {
        self.compiler().map(|found| found.identity())
    }

    fn identified(&self) -> Option<CompilerIdentity> {
        // Not worth waiting for whoever is looking for it.
        self.found.try_with(|found| found.as_ref().map(Found::identity))?
    }
}
