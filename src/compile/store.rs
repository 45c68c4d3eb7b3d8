//! Compiled images on disk, shared by every process of a user, and the locks by which processes compile a unit once.
//!
//! ```text
//! DIRECTORY/v1/images/3f/KEY.13.0.cubin    one image, made by NVRTC 13.0
//! DIRECTORY/v1/locks/KEY.13.0              held by the process that compiles it now
//! DIRECTORY/v1/aside/...                   entries that could not be used, for somebody to look at
//! DIRECTORY/v1/compilers/...               which NVRTC a search found last, so that its version is known unopened
//! ```
//! An entry is a magic text, the length and SHA-256 of what follows, and an image ([`super::codec`]). It is written under
//! a name of its own and renamed, so a reader sees all of it or nothing. What is wrong with an entry is found by reader,
//! who moves it aside and goes on as if it had never been there. Nothing here can fail a compilation: where the
//! directory cannot be written, images stay in memory and one warning says so.
//!
//! Locks belong to open files and go with the process that holds them, however it ends. Waiting for one is bounded, and a
//! file system without locks only means that something is compiled twice.

use std::collections::HashSet;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{FlockOperation, flock};

use super::codec::{Reader, Stored};
use super::key::{Key, digest};
use crate::error::{Error, Result};
use crate::stats::{Counters, bump};
use crate::sync::{OfProcess, lock};

/// What every entry begins with.
const MAGIC: [u8; 8] = *b"OEQIMAGE";

/// Magic, length and digest.
const HEADER: usize = 8 + 8 + 32;

/// The folder below the store's directory; another layout gets another name and leaves this one alone.
const LAYOUT: &str = "v1";

/// The largest entry that is read, in bytes: far above any image, and a bound for what a broken file can ask for.
const MAX_ENTRY: u64 = 1 << 30;

/// The size of the store unless it is configured, in bytes.
pub const DEFAULT_BYTES: u64 = 1 << 30;

/// How long a process waits for another to compile what both want: several times what the largest unit takes on a busy
/// machine. Afterwards it compiles for itself.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How old the time of last use may be before a use writes a new one.
const TOUCH_AFTER: Duration = Duration::from_secs(60);

/// When a file that a dead writer left behind is old enough to be removed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// What a holder leaves in its lock's file when there will be no entry: those who wait need not wait for each other.
const GAVE_UP: u8 = b'x';

/// A file of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Where it is.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
    /// When it was last used or written.
    pub modified: SystemTime,
    /// Whether it is a folder.
    pub is_folder: bool,
}

/// What the store asks of a file system. Tests put in one that fails.
pub trait Files: Send + Sync {
    /// All of a file, and when it was modified.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, path: &Path) -> io::Result<(Vec<u8>, SystemTime)> {
        let file = File::open(path)?;
        let data = file.metadata()?;
        if !data.is_file() || data.len() > MAX_ENTRY {
            return Err(io::Error::new(ErrorKind::InvalidData, "not a file of a size that an image can have"));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(data.len()).unwrap_or(0));
        (&file).take(MAX_ENTRY).read_to_end(&mut bytes)?;
        Ok((bytes, data.modified()?))
    }

    /// Makes a file that must not exist.
    ///
    /// # Errors
    /// The system's.
    fn write_new(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?.write_all(bytes)
    }

    /// Renames, replacing what is there.
    ///
    /// # Errors
    /// The system's.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// The system's.
    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    /// Makes a folder and those above it; one that exists is fine. Only the user may enter what is made here: whoever can
    /// write images decides what runs.
    ///
    /// # Errors
    /// The system's.
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    /// The content of a folder.
    ///
    /// # Errors
    /// The system's.
    fn list(&self, folder: &Path) -> io::Result<Vec<Listed>> {
        let mut list = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            // What vanishes meanwhile was removed by somebody else.
            let Ok(data) = entry.metadata() else { continue };
            let modified = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            list.push(Listed { path: entry.path(), size: data.len(), modified, is_folder: data.is_dir() });
        }
        Ok(list)
    }

    /// Sets a file's time of modification to now.
    ///
    /// # Errors
    /// The system's.
    fn touch(&self, path: &Path) -> io::Result<()> {
        File::options().append(true).open(path)?.set_modified(SystemTime::now())
    }

    /// Opens a lock's file, making it if need be.
    ///
    /// # Errors
    /// The system's.
    fn open_lock(&self, path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o644).open(path)
    }

    /// Takes a lock on an open file, for as long as the file is open. False: somebody else has it.
    ///
    /// # Errors
    /// The system's, for example that the file system has no locks.
    fn try_lock(&self, file: &File) -> io::Result<bool> {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// The system's own file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct System;

impl Files for System {}

/// Which version of the compiler an image must come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// This one: it is installed, and would compile what is not found.
    Exactly((u16, u16)),
    /// There is no compiler. The newest that somebody else had will do.
    Any,
}

/// The store.
pub struct Store {
    root: PathBuf,
    files: Arc<dyn Files>,
    limit: u64,
    patience: Duration,
    counters: Arc<Counters>,
    /// Entries that are bad and could not be moved away.
    bad: Mutex<HashSet<PathBuf>>,
    /// Bytes in the store, once they were counted.
    total: OfProcess<Mutex<Option<u64>>>,
    memory_only: AtomicBool,
    warned: AtomicBool,
    writes: AtomicU64,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("root", &self.root).field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// What asking for a unit's lock gives.
#[derive(Debug)]
pub enum Locked {
    /// This process has it, until the value is dropped.
    Held(Hold),
    /// Another process is compiling the unit.
    Busy,
    /// There is no lock to be had, or no sense in waiting for it. Compile, and do not wait for anybody.
    Without,
}

/// Whether a name is that of an open file.
fn leads_to(path: &Path, file: &File) -> io::Result<bool> {
    let (own, named) = (file.metadata()?, fs::metadata(path));
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino())))
}

/// A lock that is held. Dropped, it is free, and its file is gone.
pub struct Hold {
    file: File,
    path: PathBuf,
    files: Arc<dyn Files>,
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hold({})", self.path.display())
    }
}

impl Hold {
    /// Tells those who wait that they will not find an entry.
    pub fn give_up(&mut self) {
        let _ = self.file.write_all(&[GAVE_UP]);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        // Removed while the lock is held: whoever opened the file before sees that its name leads elsewhere now.
        let _ = self.files.remove(&self.path);
        // Closing the file does not do where the process has forked: a child that lives on has it open, too.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

impl Store {
    /// A store in `directory`, which need not exist, of at most `limit` bytes. Touches nothing.
    #[must_use]
    pub fn new(directory: &Path, limit: u64, counters: Arc<Counters>) -> Self {
        Self::with(directory, limit, PATIENCE, Arc::new(System), counters)
    }

    /// A store on a file system of one's own.
    #[must_use]
    pub fn with(
        directory: &Path,
        limit: u64,
        patience: Duration,
        files: Arc<dyn Files>,
        counters: Arc<Counters>,
    ) -> Self {
        Self {
            root: directory.join(LAYOUT),
            files,
            limit,
            patience,
            counters,
            bad: Mutex::default(),
            total: OfProcess::default(),
            memory_only: AtomicBool::new(false),
            warned: AtomicBool::new(false),
            writes: AtomicU64::new(0),
        }
    }

    /// Where the store is.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Whether writing was given up.
    #[must_use]
    pub fn is_memory_only(&self) -> bool {
        self.memory_only.load(Ordering::Relaxed)
    }

    fn folder_of(&self, key: &Key) -> PathBuf {
        self.root.join("images").join(format!("{:02x}", key.0[0]))
    }

    /// The image of a unit. An entry that cannot be used is moved aside and is not there.
    #[must_use]
    pub fn find(&self, key: &Key, wanted: Wanted) -> Option<Stored> {
        let folder = self.folder_of(key);
        let candidates = match wanted {
            Wanted::Exactly((major, minor)) => {
                ["cubin", "ptx"].map(|kind| folder.join(format!("{key}.{major}.{minor}.{kind}"))).to_vec()
            }
            Wanted::Any => self.every_version(&folder, key),
        };
        candidates.into_iter().find_map(|path| self.read(&path, key))
    }

    /// The entries of a key, the newest compiler's first, machine code before PTX.
    fn every_version(&self, folder: &Path, key: &Key) -> Vec<PathBuf> {
        let prefix = format!("{key}.");
        let mut found: Vec<((u16, u16), bool, PathBuf)> = Vec::new();
        for file in self.files.list(folder).unwrap_or_default() {
            let Some(name) = file.path.file_name().and_then(|name| name.to_str()) else { continue };
            let mut parts = name.strip_prefix(&prefix).unwrap_or_default().split('.');
            let (major, minor) = (parts.next().map(str::parse), parts.next().map(str::parse));
            if let (Some(Ok(major)), Some(Ok(minor)), Some(kind)) = (major, minor, parts.next()) {
                found.push(((major, minor), kind == "cubin", file.path));
            }
        }
        found.sort_unstable_by(|a, b| b.cmp(a));
        found.into_iter().map(|(_, _, path)| path).collect()
    }

    fn read(&self, path: &Path, key: &Key) -> Option<Stored> {
        if lock(&self.bad).contains(path) {
            return None;
        }
        let (bytes, used) = match self.files.read(path) {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                self.set_aside(path, &error.to_string());
                return None;
            }
            Err(error) => {
                // Not the entry's fault, so it stays; the unit is compiled.
                self.warn_once(&format_args!("cannot read {}: {error}", path.display()));
                return None;
            }
        };
        match unwrap(&bytes).and_then(Stored::decode) {
            Ok(stored) if stored.key == *key => {
                if used.elapsed().is_ok_and(|age| age > TOUCH_AFTER) {
                    let _ = self.files.touch(path);
                }
                Some(stored)
            }
            Ok(stored) => {
                self.set_aside(path, &format!("it holds another unit, {}", stored.key));
                None
            }
            Err(error) => {
                self.set_aside(path, error.message());
                None
            }
        }
    }

    /// Moves an entry out of the way and says so, once.
    fn set_aside(&self, path: &Path, reason: &str) {
        bump(&self.counters.store_damaged);
        let folder = self.root.join("aside");
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let to = folder.join(format!("{name}.{}", self.own_name()));
        let moved = self.files.create_folder(&folder).and_then(|()| self.files.rename(path, &to));
        match moved {
            Ok(()) => log::warn!(
                "oeq-native: the stored image {} cannot be used: {reason}. It is compiled again; the file is now {}",
                path.display(),
                to.display()
            ),
            // Another process that read it too was faster, and has said so.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => {
                lock(&self.bad).insert(path.to_owned());
                log::warn!(
                    "oeq-native: the stored image {} cannot be used: {reason}. It is compiled again; the file could not be \
                     moved aside: {error}",
                    path.display()
                );
            }
        }
    }

    /// A name that no other writer uses.
    fn own_name(&self) -> String {
        // Processes on two machines can share a number, and a directory; the time tells them apart.
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
        format!("{}-{time:x}-{}", std::process::id(), self.writes.fetch_add(1, Ordering::Relaxed))
    }

    /// Keeps an image. False where it was not kept.
    pub fn put(&self, stored: &Stored) -> bool {
        let body = stored.encode();
        let size = (HEADER + body.len()) as u64;
        if self.is_memory_only() || size > self.limit {
            return false;
        }
        let (major, minor) = stored.compiler;
        let name = format!("{}.{major}.{minor}.{}", stored.key, stored.image.kind().name());
        let path = self.folder_of(&stored.key).join(name);
        let mut entry = Vec::with_capacity(HEADER + body.len());
        entry.extend_from_slice(&MAGIC);
        entry.extend_from_slice(&(body.len() as u64).to_le_bytes());
        entry.extend_from_slice(&digest(&body));
        entry.extend_from_slice(&body);
        match self.publish(&path, &entry) {
            Ok(()) => {
                lock(&self.bad).remove(&path);
                bump(&self.counters.store_writes);
                self.grow(size, &path);
                true
            }
            Err(error) => {
                self.cannot_write(&error);
                false
            }
        }
    }

    /// Writes a file aside and renames it.
    fn publish(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let folder = path.parent().unwrap_or(&self.root);
        let mut attempt = 0;
        loop {
            let aside = folder.join(format!("new-{}", self.own_name()));
            let done = self.files.write_new(&aside, bytes).and_then(|()| self.files.rename(&aside, path));
            let Err(error) = done else { return Ok(()) };
            // Whatever was written of it; ours alone by its name.
            let _ = self.files.remove(&aside);
            attempt += 1;
            match error.kind() {
                // Some file systems do not replace. Then somebody was faster, with the same.
                ErrorKind::AlreadyExists => return Ok(()),
                ErrorKind::NotFound if attempt == 1 => self.files.create_folder(folder)?,
                // A file server lost track, or another process removed the folder: worth one more try.
                ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle | ErrorKind::Interrupted if attempt < 3 => {}
                _ => return Err(error),
            }
        }
    }

    fn cannot_write(&self, error: &io::Error) {
        bump(&self.counters.store_write_failures);
        if matches!(error.kind(), ErrorKind::StaleNetworkFileHandle | ErrorKind::Interrupted) {
            // May pass. This image is not kept, the next may be.
            log::debug!("oeq-native: an image was not stored: {error}");
            return;
        }
        self.memory_only.store(true, Ordering::Relaxed);
        self.warn_once(&format_args!("cannot write: {error}"));
    }

    /// The one warning about the directory.
    fn warn_once(&self, what: &dyn fmt::Display) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            log::warn!(
                "oeq-native: the store of compiled kernels at {} {what}; compiled kernels are kept in memory only \
                 (OEQ_STORE_DIR names another directory, OEQ_STORE=off uses none)",
                self.root.display()
            );
        }
    }

    // ---- The bound ----------------------------------------------------------------------------------------------------

    /// Counts what was written, and removes what was used least recently where there is too much.
    fn grow(&self, by: u64, newest: &Path) {
        self.total.with(|total| {
            let sum = match *total {
                Some(known) => known + by,
                None => self.everything().iter().map(|file| file.size).sum(),
            };
            *total = Some(if sum > self.limit { self.evict(newest) } else { sum });
        });
    }

    /// Every file that counts.
    fn everything(&self) -> Vec<Listed> {
        let list = |folder: &Path| self.files.list(folder).unwrap_or_default();
        let mut files = list(&self.root.join("aside"));
        for shard in list(&self.root.join("images")).into_iter().filter(|file| file.is_folder) {
            files.extend(list(&shard.path));
        }
        files.retain(|file| !file.is_folder);
        files
    }

    /// Removes the oldest files down to nine tenths of the bound, and what dead writers left. Tells what remains.
    fn evict(&self, newest: &Path) -> u64 {
        let mut files = self.everything();
        let is_aside = |file: &Listed| file.path.parent().is_some_and(|folder| folder.ends_with("aside"));
        // Nobody needs what was moved aside.
        files.sort_by_key(|file| (!is_aside(file), file.modified));
        let mut total: u64 = files.iter().map(|file| file.size).sum();
        let goal = self.limit / 10 * 9;
        for file in files {
            let unfinished = file.path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"new-"));
            let abandoned = file.modified.elapsed().is_ok_and(|age| age > ABANDONED);
            let wanted = if unfinished { abandoned } else { total > goal && file.path != newest };
            // What another process removed first is gone as well.
            if wanted && self.files.remove(&file.path).map_or_else(|e| e.kind() == ErrorKind::NotFound, |()| true) {
                total -= file.size;
                bump(&self.counters.store_evictions);
            }
        }
        total
    }

    // ---- Locks --------------------------------------------------------------------------------------------------------

    /// The lock of a unit that is to be compiled. With `wait`, waits until it is free, but not for ever.
    #[must_use]
    pub fn lock(&self, key: &Key, (major, minor): (u16, u16), wait: bool) -> Locked {
        if self.is_memory_only() {
            return Locked::Without;
        }
        let path = self.root.join("locks").join(format!("{key}.{major}.{minor}"));
        match self.lock_at(&path, wait) {
            Ok(locked) => locked,
            Err(error) => {
                log::debug!("oeq-native: no lock at {}: {error}", path.display());
                Locked::Without
            }
        }
    }

    fn lock_at(&self, path: &Path, wait: bool) -> io::Result<Locked> {
        let begin = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            let mut file = match self.files.open_lock(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    self.files.create_folder(path.parent().unwrap_or(&self.root))?;
                    self.files.open_lock(path)?
                }
                other => other?,
            };
            let mut waited = false;
            while !self.files.try_lock(&file)? {
                // Whoever holds a file without a name is done with it, or was, when it forked.
                if waited && !leads_to(path, &file)? {
                    break;
                }
                if !wait {
                    return Ok(Locked::Busy);
                }
                if begin.elapsed() > self.patience {
                    log::info!("oeq-native: another process holds {} for long; compiling here too", path.display());
                    return Ok(Locked::Without);
                }
                waited = true;
                thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(20));
            }
            let mut left = Vec::new();
            file.read_to_end(&mut left)?;
            if left.first() == Some(&GAVE_UP) && waited {
                return Ok(Locked::Without);
            }
            // The name may lead to another file by now: the one before us removed it. Then ours is nobody's lock.
            if leads_to(path, &file)? {
                file.set_len(0)?;
                file.rewind()?;
                return Ok(Locked::Held(Hold { file, path: path.to_owned(), files: Arc::clone(&self.files) }));
            }
        }
    }

    // ---- Which compiler -----------------------------------------------------------------------------------------------

    /// The version of the compiler that a search with this name found last, if its file is still the same.
    #[must_use]
    pub fn remembered_compiler(&self, search: &str) -> Option<(u16, u16)> {
        let (bytes, _) = self.files.read(&self.compiler_file(search)).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let (facts, path) = text.split_once('\n')?;
        let mut facts = facts.split(' ');
        let version = (facts.next()?.parse().ok()?, facts.next()?.parse().ok()?);
        (facts.next()? == facts_of(Path::new(path)).ok()?).then_some(version)
    }

    /// Remembers the version of the compiler that a search found.
    pub fn remember_compiler(&self, search: &str, (major, minor): (u16, u16), library: &Path) {
        if self.is_memory_only() || self.remembered_compiler(search) == Some((major, minor)) {
            return;
        }
        let (Ok(facts), Some(path)) = (facts_of(library), library.to_str()) else { return };
        // Without it the next process opens the compiler to learn its version; nothing is lost but that time.
        let text = format!("{major} {minor} {facts}\n{path}");
        if let Err(error) = self.publish(&self.compiler_file(search), text.as_bytes()) {
            log::debug!("oeq-native: the compiler's version was not remembered: {error}");
        }
    }

    fn compiler_file(&self, search: &str) -> PathBuf {
        let name: String = Key(digest(search.as_bytes())).to_string().chars().take(16).collect();
        self.root.join("compilers").join(name)
    }
}

/// What changes when a library is replaced: its file, size and time.
fn facts_of(path: &Path) -> io::Result<String> {
    let data = fs::metadata(path)?;
    Ok(format!("{}-{}-{}.{:09}", data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
}

/// What an entry holds, if it is whole.
fn unwrap(entry: &[u8]) -> Result<&[u8]> {
    let mut reader = Reader(entry);
    if reader.take(MAGIC.len())? != MAGIC {
        return Err(Error::invalid("it is not an image of oeq-native"));
    }
    let length = reader.u64()?;
    let expected: [u8; 32] = reader.array()?;
    if reader.0.len() as u64 != length {
        return Err(Error::invalid(format!("it has {} bytes of the {length} that it should have", reader.0.len())));
    }
    if digest(reader.0) != expected {
        return Err(Error::invalid("its digest does not match its content"));
    }
    Ok(reader.0)
}
