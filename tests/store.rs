//! The store of compiled images under every fault that we know how to inject: damaged entries, file systems that refuse,
//! processes that die, and many processes at once. `--nocapture` shows the table of faults and outcomes.
//!
//! The compiler is a stand-in that takes a while and leaves a mark for each compilation. Tests that need a process of their
//! own run this program again for one test, with `OEQ_TEST_CHILD` telling that test that it is the child.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test that cannot go on should stop, and the table is for people"
)]

use std::borrow::Cow;
use std::env;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::FromRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use oeq_native::compile::images::{Request, label};
use oeq_native::compile::key::digest;
use oeq_native::compile::progress::Step;
use oeq_native::compile::store::{Files, Listed, Locked, Store, System, Wanted};
use oeq_native::compile::{Compiler, CompilerIdentity, Image, Images, Key, Program, Target};
use oeq_native::stats::{Counters, Stats};
use oeq_native::{Error, Result};

// ---- Stand-ins ----------------------------------------------------------------------------------------------------------

/// A compiler of one version that may be missing, may be slow, and counts.
struct Stub {
    version: (u16, u16),
    installed: bool,
    opened: AtomicUsize,
    compiled: AtomicUsize,
    time: Duration,
    /// A file that gets one byte for each compilation, by whichever process.
    marks: Option<PathBuf>,
    library: PathBuf,
}

impl Stub {
    fn new(version: (u16, u16)) -> Self {
        Self {
            version,
            installed: true,
            opened: AtomicUsize::new(0),
            compiled: AtomicUsize::new(0),
            time: Duration::ZERO,
            marks: None,
            library: env::current_exe().unwrap(),
        }
    }
}

impl Compiler for Stub {
    fn compile(&self, program: &Program<'_>) -> Result<Image> {
        if !self.installed {
            return Err(Error::precondition("no compiler"));
        }
        self.compiled.fetch_add(1, Ordering::SeqCst);
        if let Some(marks) = &self.marks {
            let mut file = File::options().append(true).create(true).open(marks).unwrap();
            file.write_all(b".").unwrap();
        }
        thread::sleep(self.time);
        if program.source.contains("broken") {
            return Err(Error::invalid("error: broken"));
        }
        let code = format!("\x7fELF {} {} {:?}", program.source, program.architecture, self.version).into_bytes();
        let symbols = program.entry_points.iter().map(|entry| ((*entry).to_owned(), format!("_Z{entry}"))).collect();
        Ok(Image { code, symbols, log: "a remark".into() })
    }

    fn search(&self) -> Option<String> {
        Some("stub".into())
    }

    fn identify(&self) -> Result<CompilerIdentity> {
        if !self.installed {
            return Err(Error::precondition("no compiler"));
        }
        self.opened.fetch_add(1, Ordering::SeqCst);
        Ok(CompilerIdentity { version: self.version, library: self.library.clone() })
    }
}

/// A directory of its own for one test, removed at its end.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("store-{name}-{}-{number}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a process of the library is to the store.
struct World {
    images: Images,
    stub: Arc<Stub>,
    counters: Arc<Counters>,
}

const LIMIT: u64 = 1 << 30;

fn world(directory: &Path, stub: Stub, files: Arc<dyn Files>, limit: u64) -> World {
    let counters = Arc::<Counters>::default();
    let store = Store::with(directory, limit, Duration::from_secs(5), files, Arc::clone(&counters));
    let stub = Arc::new(stub);
    let images = Images::with(Some(store), None, Arc::clone(&stub) as Arc<dyn Compiler>, Arc::clone(&counters));
    World { images, stub, counters }
}

fn plain(directory: &Path) -> World {
    world(directory, Stub::new((13, 0)), Arc::new(System), LIMIT)
}

fn sm_90() -> Target {
    "sm_90".parse().unwrap()
}

fn key_of(source: &str) -> Key {
    Key::new("tensor_product", &digest(source.as_bytes()), &["forward"], sm_90())
}

impl World {
    fn try_get(&self, source: &str, may_defer: bool) -> Option<Result<Image>> {
        let request = Request {
            key: key_of(source),
            family: "tensor_product",
            target: sm_90(),
            entry_points: &["forward"],
            text: &|| Cow::Borrowed(source),
            label: &label("tensor_product", &["forward"], sm_90()),
            queued: Instant::now(),
        };
        Some(self.images.obtain(&request, may_defer)?.map(|stored| stored.image))
    }

    fn get(&self, source: &str) -> Result<Image> {
        self.try_get(source, true).or_else(|| self.try_get(source, false)).unwrap()
    }

    fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    fn compiled(&self) -> usize {
        self.stub.compiled.load(Ordering::SeqCst)
    }
}

/// The entries below a store's directory.
fn entries(directory: &Path, folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![directory.join("v1").join(folder)];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let path = entry.unwrap().path();
            if path.is_dir() { open.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

fn forget_compilers(tree: &Tree) {
    for file in entries(&tree.0, "compilers") {
        fs::remove_file(file).unwrap();
    }
}

/// The warnings that the library logged on this thread.
fn warnings(body: impl FnOnce()) -> Vec<String> {
    struct Collect;
    thread_local! {
        static LINES: std::cell::RefCell<Vec<String>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    impl log::Log for Collect {
        fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
            metadata.level() <= log::Level::Warn
        }
        fn log(&self, record: &log::Record<'_>) {
            if self.enabled(record.metadata()) {
                LINES.with_borrow_mut(|lines| lines.push(record.args().to_string()));
            }
        }
        fn flush(&self) {}
    }
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        log::set_logger(&Collect).unwrap();
        log::set_max_level(log::LevelFilter::Info);
    });
    LINES.take();
    body();
    LINES.take()
}

fn row(fault: &str, outcome: &str) {
    println!("| {fault:<52} | {outcome:<96} |");
}

// ---- The plain case -----------------------------------------------------------------------------------------------------

#[test]
fn a_second_process_compiles_nothing_and_does_not_even_open_the_compiler() {
    let tree = Tree::new("plain");
    let first = plain(&tree.0);
    let made = first.get("one").unwrap();
    assert_eq!(first.stats().store_misses, 1);
    assert_eq!((first.compiled(), first.stats().compiled, first.stats().store_writes), (1, 1, 1));

    let second = plain(&tree.0);
    let found = second.get("one").unwrap();
    assert_eq!((found.code, found.symbols), (made.code, made.symbols));
    assert_eq!((second.compiled(), second.stats().store_hits, second.stats().store_misses), (0, 1, 0));
    assert_eq!(second.stub.opened.load(Ordering::SeqCst), 0, "the compiler was opened");
    // One entry, and no lock, no half of a file left.
    assert_eq!((entries(&tree.0, "images").len(), entries(&tree.0, "locks").len()), (1, 0));
}

#[test]
fn without_a_compiler_what_any_version_made_will_do_and_what_is_not_there_is_told() {
    let tree = Tree::new("without");
    for version in [(13, 0), (13, 2), (12, 9)] {
        // Each time the library that was remembered is gone.
        forget_compilers(&tree);
        world(&tree.0, Stub::new(version), Arc::new(System), LIMIT).get("one").unwrap();
    }
    forget_compilers(&tree);
    let none = world(&tree.0, Stub { installed: false, ..Stub::new((0, 0)) }, Arc::new(System), LIMIT);
    let found = none.get("one").unwrap();
    assert!(String::from_utf8(found.code).unwrap().contains("(13, 2)"), "the newest version's is taken");
    assert!(none.get("two").unwrap_err().message().contains("no compiler"));
}

#[test]
fn another_version_of_the_compiler_compiles_for_itself() {
    let tree = Tree::new("versions");
    let old = plain(&tree.0);
    old.get("one").unwrap();
    // An update in place: the library's file changes, so its version is asked again.
    let library = tree.0.join("library");
    fs::write(&library, "newer").unwrap();
    let first = world(&tree.0, Stub { library: library.clone(), ..Stub::new((13, 1)) }, Arc::new(System), LIMIT);
    // What is remembered is the old library, whose file is still as it was: its images are taken.
    first.get("one").unwrap();
    assert_eq!(first.compiled(), 0);
    // As soon as something has to be compiled the search is made, and leads to the new one.
    first.get("two").unwrap();
    assert_eq!(first.compiled(), 1);
    let second = world(&tree.0, Stub { library: library.clone(), ..Stub::new((13, 1)) }, Arc::new(System), LIMIT);
    second.get("one").unwrap();
    assert_eq!(second.compiled(), 1);
    // The next update is seen at once, for the remembered file has changed.
    fs::write(&library, "newest of all").unwrap();
    let third = world(&tree.0, Stub { library, ..Stub::new((13, 2)) }, Arc::new(System), LIMIT);
    third.get("two").unwrap();
    assert_eq!(third.compiled(), 1);
    let names = entries(&tree.0, "images").iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
    let count = |version: &str| names.iter().filter(|name| name.contains(version)).count();
    assert_eq!((count(".13.0."), count(".13.1."), count(".13.2.")), (1, 2, 1), "{names:?}");
}

#[test]
fn errors_are_not_stored() {
    let tree = Tree::new("errors");
    for _ in 0..2 {
        let world = plain(&tree.0);
        assert!(world.get("broken").unwrap_err().message().contains("error: broken"));
        assert_eq!((world.compiled(), world.stats().failed, world.stats().compiled), (1, 1, 0));
    }
    assert!(entries(&tree.0, "images").is_empty() && entries(&tree.0, "locks").is_empty());
}

#[test]
fn what_was_used_least_recently_goes_first() {
    let tree = Tree::new("bound");
    let size = {
        let probe = Tree::new("probe");
        plain(&probe.0).get("source 0").unwrap();
        fs::metadata(&entries(&probe.0, "images")[0]).unwrap().len()
    };
    let world = world(&tree.0, Stub::new((13, 0)), Arc::new(System), size * 10 + size / 2);
    for number in 0..10 {
        world.get(&format!("source {number}")).unwrap();
        // Ages in the order of making, an hour apart, so that the file system's clock plays no part.
        let age = Duration::from_secs(3600 * (20 - number));
        let path = entry_of(&tree.0, &format!("source {number}"));
        File::options().append(true).open(path).unwrap().set_modified(SystemTime::now() - age).unwrap();
    }
    // The oldest is used again, and is the youngest thereby.
    plain(&tree.0).get("source 0").unwrap();
    world.get("source x").unwrap();
    let left: Vec<u64> = (0..10).filter(|number| entry_of(&tree.0, &format!("source {number}")).exists()).collect();
    assert_eq!(left, [0, 3, 4, 5, 6, 7, 8, 9]);
    assert!(entry_of(&tree.0, "source x").exists());
    assert_eq!(world.stats().store_evictions, 2);
    // An image that is larger than the whole store is not worth throwing everything out for.
    let tiny = self::world(&tree.0, Stub::new((13, 0)), Arc::new(System), 10);
    tiny.get("source y").unwrap();
    assert!(!entry_of(&tree.0, "source y").exists() && entry_of(&tree.0, "source x").exists());
}

fn entry_of(directory: &Path, source: &str) -> PathBuf {
    let key = key_of(source).to_string();
    directory.join("v1/images").join(&key[..2]).join(format!("{key}.13.0.cubin"))
}

// ---- Damaged entries ----------------------------------------------------------------------------------------------------

#[test]
fn every_damaged_entry_is_set_aside_reported_once_and_compiled_once() {
    let tree = Tree::new("damaged");
    plain(&tree.0).get("one").unwrap();
    plain(&tree.0).get("other").unwrap();
    let path = entry_of(&tree.0, "one");
    let good = fs::read(&path).unwrap();
    let foreign = fs::read(entry_of(&tree.0, "other")).unwrap();
    let flipped = |place: usize| {
        let mut bytes = good.clone();
        bytes[place] ^= 4;
        bytes
    };
    // Magic, length and digest are right, the image in it has another format version.
    let newer = {
        let mut body = good[48..].to_vec();
        body[0] += 1;
        [&good[..16], &digest(&body), &body].concat()
    };
    let faults: Vec<(&str, Vec<u8>)> = vec![
        ("empty file", Vec::new()),
        ("truncated in the header", good[..20].to_vec()),
        ("truncated in the image", good[..good.len() - 7].to_vec()),
        ("longer than it says", [good.as_slice(), b"x"].concat()),
        ("bit flipped in the magic text", flipped(3)),
        ("bit flipped in the length", flipped(9)),
        ("bit flipped in the digest", flipped(30)),
        ("bit flipped in the image", flipped(good.len() - 5)),
        ("somebody else's file", b"PNG, or whatever".to_vec()),
        ("another unit's entry under this name", foreign),
        ("another format version", newer),
        ("zeros, as after a power cut", vec![0; good.len()]),
    ];
    let count = faults.len();
    for (index, (fault, bytes)) in faults.into_iter().enumerate() {
        fs::write(&path, bytes).unwrap();
        let (once, twice, third) = (plain(&tree.0), plain(&tree.0), plain(&tree.0));
        let told = warnings(|| {
            assert!(once.get("one").unwrap().code.starts_with(b"\x7fELF one"));
            once.get("one").unwrap();
            twice.get("one").unwrap();
        });
        third.get("one").unwrap();
        assert_eq!(told.len(), 1, "{fault}: {told:?}");
        assert!(told[0].contains("cannot be used") && told[0].contains(path.to_str().unwrap()), "{told:?}");
        assert_eq!((once.compiled(), twice.compiled(), third.compiled()), (1, 0, 0), "{fault}");
        assert_eq!(once.stats().store_damaged, 1);
        assert_eq!(fs::read(&path).unwrap(), good, "{fault}: the new entry is as the first one was");
        assert_eq!(entries(&tree.0, "aside").len(), index + 1);
        row(fault, "set aside, reported once, compiled once, later processes find the new entry");
    }
    // Every bit of an entry, not only those above.
    for place in 0..good.len() {
        fs::write(&path, flipped(place)).unwrap();
        let store = Store::new(&tree.0, LIMIT, Arc::default());
        assert!(store.find(&key_of("one"), Wanted::Exactly((13, 0))).is_none(), "byte {place}");
    }
    row("one bit flipped in each of its bytes in turn", "not taken, set aside");
    assert_eq!(entries(&tree.0, "aside").len(), count + good.len());
}

#[test]
fn a_damaged_entry_that_cannot_be_moved_is_passed_over_and_replaced() {
    let tree = Tree::new("unmovable");
    plain(&tree.0).get("one").unwrap();
    fs::write(entry_of(&tree.0, "one"), "junk").unwrap();
    let files = Faulty::new(Operation::Rename, ErrorKind::PermissionDenied, |path| path.ends_with("aside"));
    let world = world(&tree.0, Stub::new((13, 0)), Arc::new(files), LIMIT);
    let told = warnings(|| {
        world.get("one").unwrap();
        world.get("one").unwrap();
    });
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("could not be moved aside"), "{told:?}");
    assert_eq!(world.compiled(), 1);
    row("damaged entry in a folder that cannot be written to", "passed over, reported once, replaced where possible");
}

#[test]
fn a_folder_in_the_place_of_an_entry_does_no_harm() {
    let tree = Tree::new("folder");
    fs::create_dir_all(entry_of(&tree.0, "one")).unwrap();
    let world = plain(&tree.0);
    world.get("one").unwrap();
    assert_eq!(world.compiled(), 1);
    let next = plain(&tree.0);
    next.get("one").unwrap();
    assert_eq!(next.compiled(), 0);
    row("a folder in the place of an entry", "moved aside, compiled once");
}

// ---- File systems that refuse -------------------------------------------------------------------------------------------

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Read,
    Write,
    Rename,
    Create,
    OpenLock,
    Lock,
}

/// The system's file system, of which one operation fails on some paths.
struct Faulty {
    operation: Operation,
    error: Box<dyn Fn() -> io::Error + Send + Sync>,
    applies: fn(&Path) -> bool,
    /// How many more times it fails.
    times: AtomicUsize,
    failed: AtomicUsize,
}

impl Faulty {
    fn new(operation: Operation, kind: ErrorKind, applies: fn(&Path) -> bool) -> Self {
        Self {
            operation,
            error: Box::new(move || kind.into()),
            applies,
            times: AtomicUsize::new(usize::MAX),
            failed: AtomicUsize::new(0),
        }
    }

    fn code(operation: Operation, code: i32) -> Self {
        Self {
            error: Box::new(move || io::Error::from_raw_os_error(code)),
            ..Self::new(operation, ErrorKind::Other, |_| true)
        }
    }

    fn check(&self, operation: Operation, path: &Path) -> io::Result<()> {
        let left = |times: usize| times.checked_sub(1);
        if operation == self.operation
            && (self.applies)(path.parent().unwrap_or(path))
            && self.times.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_ok()
        {
            self.failed.fetch_add(1, Ordering::SeqCst);
            return Err((self.error)());
        }
        Ok(())
    }
}

impl Files for Faulty {
    fn read(&self, path: &Path) -> io::Result<(Vec<u8>, SystemTime)> {
        self.check(Operation::Read, path)?;
        System.read(path)
    }
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        if let Err(error) = self.check(Operation::Write, path) {
            // A full disk takes a part first.
            let _ = System.write_new(path, &bytes[..bytes.len() / 2]);
            return Err(error);
        }
        System.write_new(path, bytes)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check(Operation::Rename, to)?;
        System.rename(from, to)
    }
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.check(Operation::Create, path)?;
        System.create_folder(path)
    }
    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>> {
        System.list(folder)
    }
    fn open_lock(&self, path: &Path) -> io::Result<File> {
        self.check(Operation::OpenLock, path)?;
        System.open_lock(path)
    }
    fn try_lock(&self, file: &File) -> io::Result<bool> {
        self.check(Operation::Lock, Path::new("a/b"))?;
        System.try_lock(file)
    }
}

#[test]
fn a_file_system_that_refuses_costs_one_warning_and_no_kernel() {
    let cases = [
        ("ENOSPC while writing", Operation::Write, libc::ENOSPC),
        ("EDQUOT while writing", Operation::Write, libc::EDQUOT),
        ("EACCES while writing", Operation::Write, libc::EACCES),
        ("EROFS while writing", Operation::Write, libc::EROFS),
        ("EIO while writing", Operation::Write, libc::EIO),
        ("EACCES while making a folder", Operation::Create, libc::EACCES),
        ("ENOTDIR while making a folder", Operation::Create, libc::ENOTDIR),
        ("ENOSPC while renaming", Operation::Rename, libc::ENOSPC),
        ("EXDEV while renaming", Operation::Rename, libc::EXDEV),
    ];
    for (fault, operation, code) in cases {
        let tree = Tree::new("refuses");
        let world = world(&tree.0, Stub::new((13, 0)), Arc::new(Faulty::code(operation, code)), LIMIT);
        let told = warnings(|| {
            for source in ["one", "two", "three"] {
                world.get(source).unwrap();
            }
        });
        assert_eq!(told.len(), 1, "{fault}: {told:?}");
        assert!(told[0].contains("in memory only") && told[0].contains(tree.0.to_str().unwrap()), "{told:?}");
        assert_eq!((world.compiled(), world.stats().compiled), (3, 3));
        assert!(world.images.store().unwrap().is_memory_only());
        assert_eq!(entries(&tree.0, ""), Vec::<PathBuf>::new(), "{fault}: something was left");
        row(fault, "compiled, in memory only, one warning, nothing left behind");
    }
}

#[test]
fn what_may_pass_is_tried_again() {
    for (fault, operation, code, times, kept) in [
        ("EEXIST on rename", Operation::Rename, libc::EEXIST, usize::MAX, false),
        ("ESTALE on rename, once", Operation::Rename, libc::ESTALE, 1, true),
        ("ESTALE on rename, always", Operation::Rename, libc::ESTALE, usize::MAX, false),
        ("ENOENT on rename, once (folder removed meanwhile)", Operation::Rename, libc::ENOENT, 1, true),
        ("EINTR while writing, once", Operation::Write, libc::EINTR, 1, true),
    ] {
        let tree = Tree::new("passing");
        fs::create_dir_all(entry_of(&tree.0, "one").parent().unwrap()).unwrap();
        let files = Arc::new(Faulty { times: AtomicUsize::new(times), ..Faulty::code(operation, code) });
        let world = world(&tree.0, Stub::new((13, 0)), Arc::clone(&files) as Arc<dyn Files>, LIMIT);
        // The hint about the compiler is written first; it is not what is looked at here.
        world.images.store().unwrap().remember_compiler("stub", (13, 0), &world.stub.library);
        files.times.store(times, Ordering::SeqCst);
        let told = warnings(|| drop(world.get("one").unwrap()));
        assert!(told.is_empty(), "{fault}: {told:?}");
        assert!(files.failed.load(Ordering::SeqCst) >= 1, "{fault} did not happen");
        assert!(!world.images.store().unwrap().is_memory_only());
        assert_eq!(entry_of(&tree.0, "one").exists(), kept, "{fault}");
        let rest = entries(&tree.0, "images").into_iter().filter(|path| *path != entry_of(&tree.0, "one"));
        assert_eq!(rest.collect::<Vec<_>>(), Vec::<PathBuf>::new(), "{fault}: something was left");
        row(fault, if kept { "tried again, stored" } else { "compiled, this image is not stored, later ones may be" });
    }
}

#[test]
fn an_entry_that_cannot_be_read_stays_where_it_is() {
    for (fault, code) in [
        ("EACCES while reading", libc::EACCES),
        ("EIO while reading", libc::EIO),
        ("ESTALE while reading", libc::ESTALE),
    ] {
        let tree = Tree::new("unreadable");
        plain(&tree.0).get("one").unwrap();
        let world = world(&tree.0, Stub::new((13, 0)), Arc::new(Faulty::code(Operation::Read, code)), LIMIT);
        let told = warnings(|| {
            world.get("one").unwrap();
            world.get("two").unwrap();
        });
        assert_eq!((told.len(), world.compiled()), (1, 2), "{fault}: {told:?}");
        assert!(entries(&tree.0, "aside").is_empty());
        let next = plain(&tree.0);
        next.get("one").unwrap();
        assert_eq!(next.compiled(), 0);
        row(fault, "compiled, one warning, the entry stays");
    }
}

#[test]
fn a_file_system_without_locks_only_means_more_work() {
    for (fault, operation, code) in [
        ("ENOLCK on lock", Operation::Lock, libc::ENOLCK),
        ("EOPNOTSUPP on lock", Operation::Lock, libc::EOPNOTSUPP),
        ("EACCES on the lock's file", Operation::OpenLock, libc::EACCES),
    ] {
        let tree = Tree::new("lockless");
        let worlds = [(); 2].map(|()| {
            world(
                &tree.0,
                Stub { time: Duration::from_millis(200), ..Stub::new((13, 0)) },
                Arc::new(Faulty::code(operation, code)),
                LIMIT,
            )
        });
        let begin = Instant::now();
        thread::scope(|scope| {
            for world in &worlds {
                scope.spawn(|| world.get("one").unwrap());
            }
        });
        assert!(begin.elapsed() < Duration::from_secs(2));
        let sum: usize = worlds.iter().map(World::compiled).sum();
        assert!((1..=2).contains(&sum), "{sum}");
        let next = plain(&tree.0);
        next.get("one").unwrap();
        assert_eq!(next.compiled(), 0);
        row(fault, "compiled by both processes, stored, no waiting");
    }
}

#[test]
fn a_directory_that_cannot_be_is_memory_only() {
    let tree = Tree::new("cannot-be");
    fs::write(tree.0.join("file"), "").unwrap();
    let world = plain(&tree.0.join("file/below"));
    let told = warnings(|| {
        world.get("one").unwrap();
        world.get("two").unwrap();
    });
    assert_eq!((told.len(), world.compiled()), (1, 2), "{told:?}");
    row("OEQ_STORE_DIR below a file", "compiled, in memory only, one warning");

    let world = plain(Path::new("/proc/nonesuch"));
    let told = warnings(|| drop(world.get("one").unwrap()));
    assert_eq!((told.len(), world.compiled()), (1, 1), "{told:?}");
    row("OEQ_STORE_DIR in a file system that takes no files", "compiled, in memory only, one warning");
}

// ---- Processes ----------------------------------------------------------------------------------------------------------

fn role() -> Option<String> {
    env::var("OEQ_TEST_CHILD").ok()
}

fn child(test: &str, role: &str, tree: &Tree) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("OEQ_TEST_CHILD", role).env("OEQ_TEST_TREE", &tree.0).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finish(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{told}", output.status);
    assert!(told.contains("1 passed"), "the child ran no test\n{told}");
    told
}

/// The tree of a child, and a compiler that leaves marks in it.
fn marked(time: u64) -> (PathBuf, Stub) {
    let tree = PathBuf::from(env::var_os("OEQ_TEST_TREE").unwrap());
    let marks = tree.join("marks");
    (tree.join("store"), Stub { time: Duration::from_millis(time), marks: Some(marks), ..Stub::new((13, 0)) })
}

fn marks(tree: &Tree) -> u64 {
    fs::metadata(tree.0.join("marks")).map_or(0, |data| data.len())
}

const UNITS: usize = 12;

#[test]
fn many_processes_compile_each_unit_once_between_them() {
    const TEST: &str = "many_processes_compile_each_unit_once_between_them";
    if role().is_some() {
        let (directory, stub) = marked(100);
        let world = world(&directory, stub, Arc::new(System), LIMIT);
        // Two threads, as a pool of two: first everything that nobody else has, then what others had.
        let deferred = Mutex::new(Vec::new());
        let next = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while let Some(unit) = Some(next.fetch_add(1, Ordering::SeqCst)).filter(|unit| *unit < UNITS) {
                        if world.try_get(&format!("unit {unit}"), true).is_none() {
                            deferred.lock().unwrap().push(unit);
                        }
                    }
                });
            }
        });
        for unit in deferred.into_inner().unwrap() {
            world.try_get(&format!("unit {unit}"), false).unwrap().unwrap();
        }
        return;
    }
    let tree = Tree::new("many");
    let begin = Instant::now();
    let children: Vec<Child> = (0..8).map(|_| child(TEST, "compile", &tree).spawn().unwrap()).collect();
    for child in children {
        finish(child);
    }
    assert_eq!(marks(&tree), UNITS as u64);
    assert!(entries(&tree.0.join("store"), "locks").is_empty());
    let alone = Duration::from_millis(100) * u32::try_from(UNITS / 2).unwrap();
    println!(
        "8 processes, {UNITS} units: {UNITS} compilations, {:.2?}; two threads alone need {alone:.2?}",
        begin.elapsed()
    );
    row("8 processes want the same units at once", "each unit is compiled once between them");
}

#[test]
fn a_process_killed_while_compiling_delays_nobody_beyond_its_death() {
    const TEST: &str = "a_process_killed_while_compiling_delays_nobody_beyond_its_death";
    if let Some(role) = role() {
        let time = if role == "victim" { 400 } else { 20 };
        let (directory, stub) = marked(time);
        let begin = Instant::now();
        world(&directory, stub, Arc::new(System), LIMIT).get("one").unwrap();
        println!("took {}", begin.elapsed().as_millis());
        return;
    }
    let mut worst = 0;
    let mut while_compiling = 0;
    for round in 0..20 {
        let tree = Tree::new("killed");
        let mut victim = child(TEST, "victim", &tree).spawn().unwrap();
        // Until it is at work, then some time that differs from round to round.
        while marks(&tree) == 0 {
            thread::sleep(Duration::from_millis(1));
        }
        let waiter = child(TEST, "waiter", &tree).spawn().unwrap();
        thread::sleep(Duration::from_millis(round * 37 % 500));
        while_compiling +=
            usize::from(victim.try_wait().unwrap().is_none() && entries(&tree.0.join("store"), "images").is_empty());
        victim.kill().unwrap();
        let killed = Instant::now();
        victim.wait().unwrap();
        let told = finish(waiter);
        worst = worst.max(killed.elapsed().as_millis());
        assert!(told.contains("took "), "{told}");
        assert!(killed.elapsed() < Duration::from_secs(3), "round {round}: {:?}", killed.elapsed());
        // Whatever it left: the next process has the image, from the one entry.
        let next = plain(&tree.0.join("store"));
        next.get("one").unwrap();
        assert_eq!(next.compiled(), 0, "round {round}");
        assert!(marks(&tree) <= 2);
    }
    assert!(while_compiling >= 10, "only {while_compiling} of 20 were killed at work");
    println!("killed at work: {while_compiling} of 20; the waiting process was done at most {worst} ms after the kill");
    row("SIGKILL of a compiling process, x20", "the waiting process compiles at once, the store is whole");
}

#[test]
fn a_process_killed_while_writing_leaves_no_entry() {
    const TEST: &str = "a_process_killed_while_writing_leaves_no_entry";
    if role().is_some() {
        let (directory, stub) = marked(0);
        let world = world(&directory, stub, Arc::new(System), LIMIT);
        for unit in 0.. {
            // Large, so that most of the time is spent writing.
            world.get(&format!("{unit} {}", "x".repeat(1 << 20))).unwrap();
        }
    }
    let (mut halves, mut whole) = (0, 0);
    for round in 0..20 {
        let tree = Tree::new("writing");
        let mut victim = child(TEST, "victim", &tree).spawn().unwrap();
        while marks(&tree) < 3 {
            thread::sleep(Duration::from_millis(1));
        }
        thread::sleep(Duration::from_millis(round * 13 % 97));
        victim.kill().unwrap();
        victim.wait().unwrap();
        let store = tree.0.join("store");
        let counters = Arc::<Counters>::default();
        let reader = Store::new(&store, LIMIT, Arc::clone(&counters));
        for path in entries(&store, "images") {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            if name.starts_with("new-") {
                halves += 1;
                continue;
            }
            assert!(reader.find(&Key::parse(&name[..64]).unwrap(), Wanted::Exactly((13, 0))).is_some(), "{name}");
            whole += 1;
        }
        assert_eq!(counters.snapshot().store_damaged, 0);
    }
    assert!(whole > 0);
    println!("after 20 kills: {whole} whole entries, {halves} unfinished files, no damaged entry");
    row("SIGKILL of a process that writes entries, x20", "every entry is whole; unfinished files are removed later");
}

#[test]
fn a_holder_that_never_ends_is_not_waited_for_for_ever() {
    let tree = Tree::new("stuck");
    let counters = Arc::<Counters>::default();
    let holder = Store::new(&tree.0, LIMIT, Arc::clone(&counters));
    let Locked::Held(_hold) = holder.lock(&key_of("one"), (13, 0), false) else { panic!("not locked") };
    let store = Store::with(&tree.0, LIMIT, Duration::from_millis(300), Arc::new(System), Arc::clone(&counters));
    let stub = Arc::new(Stub::new((13, 0)));
    let images = Images::with(Some(store), None, Arc::clone(&stub) as Arc<dyn Compiler>, Arc::clone(&counters));
    let steps = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&steps);
    images.set_listener(Some(Arc::new(move |event| noted.lock().unwrap().push(event.step))));
    let world = World { images, stub, counters };
    // The first turn steps back, the second waits, and then compiles.
    assert!(world.try_get("one", true).is_none());
    let begin = Instant::now();
    world.try_get("one", false).unwrap().unwrap();
    assert!((Duration::from_millis(300)..Duration::from_secs(3)).contains(&begin.elapsed()));
    assert_eq!((world.compiled(), world.stats().store_waits), (1, 1));
    assert_eq!(*steps.lock().unwrap(), [Step::Elsewhere, Step::Compiling, Step::Compiled]);
    row("a holder that is stopped and never ends", "waited for so long as allowed, then compiled here");
}

/// A second descriptor of an open file that shares its lock, as a child has after a fork.
fn as_after_a_fork(path: &Path) -> File {
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let of_file = |link: &PathBuf| fs::read_link(link).is_ok_and(|file| file == path);
    let number = descriptors.into_iter().find(of_file).unwrap();
    let number: i32 = number.file_name().unwrap().to_str().unwrap().parse().unwrap();
    // SAFETY: the descriptor is open, and the copy is owned by what is made of it.
    unsafe { File::from_raw_fd(libc::dup(number)) }
}

#[test]
fn a_child_that_was_forked_meanwhile_and_lives_on_delays_nobody() {
    let tree = Tree::new("forked");
    let root = fs::canonicalize(&tree.0).unwrap();
    let store = Store::new(&root, LIMIT, Arc::<Counters>::default());
    let held = || {
        let Locked::Held(hold) = store.lock(&key_of("one"), (13, 0), false) else { panic!("not locked") };
        let file = entries(&root, "locks").remove(0);
        (hold, as_after_a_fork(&file), file)
    };
    // Done: who has waited goes on at once.
    let (hold, child, _) = held();
    let begin = Instant::now();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| matches!(store.lock(&key_of("one"), (13, 0), true), Locked::Held(_)));
        thread::sleep(Duration::from_millis(100));
        assert!(!waiter.is_finished());
        drop(hold);
        assert!(waiter.join().unwrap());
    });
    drop(child);
    // The name is gone but the lock is not: a holder that could not give it back.
    let (hold, child, file) = held();
    thread::scope(|scope| {
        let waiter = scope.spawn(|| matches!(store.lock(&key_of("one"), (13, 0), true), Locked::Held(_)));
        thread::sleep(Duration::from_millis(100));
        fs::remove_file(&file).unwrap();
        assert!(waiter.join().unwrap());
    });
    drop((hold, child));
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    row("a process forks while it compiles, the child lives on", "nobody waits for the child");
}

#[test]
fn those_who_wait_for_a_failure_do_not_wait_for_each_other() {
    let tree = Tree::new("failure");
    let slow = || Stub { time: Duration::from_millis(400), ..Stub::new((13, 0)) };
    let worlds: Vec<World> = (0..6).map(|_| world(&tree.0, slow(), Arc::new(System), LIMIT)).collect();
    let begin = Instant::now();
    thread::scope(|scope| {
        for world in &worlds {
            scope.spawn(|| assert!(world.get("broken").is_err()));
        }
    });
    // One after the other would take 2.4 s; a failure and then all at once takes 0.8.
    assert!(begin.elapsed() < Duration::from_millis(1600), "{:?}", begin.elapsed());
    row("the program does not compile, 6 processes", "each gets the compiler's log; nobody waits in a row");
}

#[test]
fn a_real_limit_on_file_sizes_does_not_kill_a_worker() {
    const TEST: &str = "a_real_limit_on_file_sizes_does_not_kill_a_worker";
    if role().is_some() {
        let (directory, stub) = marked(0);
        let world = Arc::new(world(&directory, stub, Arc::new(System), LIMIT));
        let limit = libc::rlimit { rlim_cur: 1000, rlim_max: 1000 };
        // SAFETY: a valid structure; the limit is this process's own.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
        // On a worker of the pool, as in real life: elsewhere SIGXFSZ would end the process.
        let pool = oeq_native::compile::Pool::new(1);
        let (send, done) = std::sync::mpsc::channel();
        let job = Box::new(move || {
            let source = "x".repeat(5000);
            let _ = send.send((world.get(&source).is_ok(), world.images.store().unwrap().is_memory_only()));
        });
        assert!(pool.submit(1, job).is_ok());
        assert_eq!(done.recv().unwrap(), (true, true));
        return;
    }
    let tree = Tree::new("limit");
    finish(child(TEST, "limited", &tree).spawn().unwrap());
    assert!(entries(&tree.0.join("store"), "images").is_empty());
    row("EFBIG of the real kernel (RLIMIT_FSIZE)", "compiled, in memory only, the process lives");
}

#[test]
fn a_full_disk_is_memory_only() {
    const TEST: &str = "a_full_disk_is_memory_only";
    if role().is_some() {
        let (directory, stub) = marked(0);
        let world = world(&directory, stub, Arc::new(System), LIMIT);
        let told = warnings(|| {
            for unit in 0..8 {
                world.get(&format!("{unit} {}", "x".repeat(30 << 10))).unwrap();
            }
        });
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].contains("No space left") && told[0].contains("in memory only"), "{told:?}");
        assert!(world.stats().store_writes >= 1 && world.images.store().unwrap().is_memory_only());
        // What was stored before it was full is whole.
        let next = plain(&directory);
        next.get(&format!("0 {}", "x".repeat(30 << 10))).unwrap();
        assert_eq!(next.compiled(), 0);
        return;
    }
    // A file system of 128 KiB, in name spaces of the child's own. Not every machine allows those.
    let tree = Tree::new("full");
    let store = tree.0.join("store");
    fs::create_dir(&store).unwrap();
    let script = "mount -t tmpfs -o size=128k none \"$1\" && shift && exec \"$@\"";
    let inner = child(TEST, "full", &tree);
    let unshare = |program: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["-rm", "sh", "-c", script, "sh"]).arg(&store).args(program);
        command
            .env("OEQ_TEST_CHILD", "full")
            .env("OEQ_TEST_TREE", &tree.0)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    };
    if !unshare(&["true"]).status().is_ok_and(|status| status.success()) {
        println!("not run: this machine does not let a test mount a small file system");
        return;
    }
    let program = inner.get_program().to_str().unwrap().to_owned();
    let arguments = inner.get_args().map(|argument| argument.to_str().unwrap());
    let command: Vec<&str> = std::iter::once(program.as_str()).chain(arguments).collect();
    let told = finish(unshare(&command).spawn().unwrap());
    assert!(told.contains("1 passed"), "{told}");
    row(
        "ENOSPC of the real kernel (a tmpfs of 128 KiB)",
        "compiled, in memory only, one warning, what was stored is whole",
    );
}
