//! The threads that compile: few, started late, gone when idle.
//!
//! A pool makes no thread until it has a job, adds one only when a job would have to wait although another thread is
//! allowed, and lets a thread go that found nothing to do for a while. The process belongs to somebody else: it may never
//! compile, it may fork, and it should not be left with threads that do nothing.
//!
//! Three facts hold whenever the lock is free, and everything else follows from them:
//! 1. A queued job has a worker that will come for it: the queue is empty or `workers > 0`.
//! 2. `idle <= workers`; the difference is the number of jobs running right now.
//! 3. A worker leaves the count only while the queue is empty and under the lock, so no job slips in behind its back.
//!
//! How many of the threads work at a time is a matter of its own, see the module `pace`.
//!
//! Starting a thread happens under the lock, because fact 1 must hold even when the system refuses the thread. That is a
//! few tens of microseconds, at most once per worker; jobs never run under the lock.
//!
//! Each process has a state of its own: a child of a fork begins with an empty queue and no workers. The parent's jobs stay
//! the parent's; the child forgets them without running their destructors.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::pace::{Load, Pace};
use super::sys;
use crate::sync::OfProcess;

/// One piece of work. It must report its own outcome; a job that panics is dropped and the worker goes on.
pub type Job = Box<dyn FnOnce() + Send + 'static>;

/// The most workers that [`default_workers`] answers. The compiler gains little from more, and the machine is shared.
pub const MOST_DEFAULT_WORKERS: usize = 16;

/// How long a worker without work stays: longer than the pauses between the kernels of one model, and no longer.
const IDLE: Duration = Duration::from_secs(5);

/// A worker's stack, in bytes. The compiler runs on it and recurses over the program. Only what is touched takes memory.
const STACK: usize = 64 << 20;

/// Names a submitted job, for [`Pool::promote`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Ticket {
    weight: u64,
    number: u64,
}

/// Where a job stands in the queue; the smallest rank runs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// Somebody waits for it; the number is its place among those.
    Promoted(u64),
    /// By weight, the heaviest first, and by ticket number among equals.
    Queued(Reverse<u64>, u64),
}

impl Ticket {
    const fn rank(self) -> Rank {
        Rank::Queued(Reverse(self.weight), self.number)
    }
}

/// Starts a thread of that name which runs the body. What tests replace.
type Spawn = dyn Fn(String, Job) -> io::Result<()> + Send + Sync;

/// A job in the queue.
struct Waiting {
    weight: u64,
    job: Job,
}

struct State {
    queue: BTreeMap<Rank, Waiting>,
    /// The weights of the jobs that run.
    running: Vec<u64>,
    pace: Pace,
    /// Which worker numbers are taken; its length is the most workers there ever were.
    slots: Vec<bool>,
    workers: usize,
    /// Workers that run no job: waiting, on their way to the lock, or just started.
    idle: usize,
    promotions: u64,
    /// The pool is gone: finish the queue, then leave.
    closed: bool,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

impl Shared {
    fn new(max_workers: usize) -> Self {
        let state = State {
            queue: BTreeMap::new(),
            running: Vec::new(),
            pace: Pace::new(max_workers, cores()),
            slots: Vec::new(),
            workers: 0,
            idle: 0,
            promotions: 0,
            closed: false,
        };
        Self { state: Mutex::new(state), work: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock, and if it did, the counts would still be those of the last whole step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn load(&self) -> Load {
        let queued = self.queue.values().map(|waiting| &waiting.weight);
        queued.chain(&self.running).fold(Load::default(), |load, weight| load.and(*weight))
    }

    /// The next job, if one more may run now; else how long to wait before asking again.
    fn next(&mut self) -> Result<Waiting, Option<Duration>> {
        let Some((rank, waiting)) = self.queue.first_key_value() else { return Err(None) };
        // Somebody waits for it, or everybody will: it may well be the last to end.
        let urgent = matches!(rank, Rank::Promoted(_)) || self.running.iter().all(|running| *running < waiting.weight);
        if !urgent {
            let load = self.load();
            let limit = self.pace.limit(Instant::now(), load);
            if self.running.len() >= limit.jobs {
                return Err(limit.changes_in);
            }
        }
        self.queue.pop_first().map(|(_, waiting)| waiting).ok_or(None)
    }
}

/// A bounded pool of compiler threads. See the module's text for what it promises.
///
/// Dropping the pool waits for nothing: jobs already submitted are still run, then the threads leave.
pub struct Pool {
    max_workers: usize,
    idle: Duration,
    spawn: Box<Spawn>,
    /// Outside the state so that a ticket from before a fork can never name a job from after it.
    tickets: AtomicU64,
    shared: OfProcess<Shared>,
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("max_workers", &self.max_workers)
            .field("workers", &self.workers())
            .field("queued", &self.queued())
            .finish_non_exhaustive()
    }
}

impl Pool {
    /// Makes a pool of at most `max_workers` threads (at least one), and starts none of them.
    #[must_use]
    pub fn new(max_workers: usize) -> Self {
        Self::with(max_workers, IDLE, Box::new(start))
    }

    fn with(max_workers: usize, idle: Duration, spawn: Box<Spawn>) -> Self {
        let max_workers = max_workers.max(1);
        Self { max_workers, idle, spawn, tickets: AtomicU64::new(0), shared: OfProcess::new(Shared::new(max_workers)) }
    }

    /// Queues a job, and starts a worker for it if none is free and one more is allowed. Never waits for a job.
    ///
    /// Jobs start in order of weight, the heaviest first, and in order of submission among equals.
    ///
    /// # Errors
    /// Gives the job back if there is no worker and the system refused to start one: then nobody would ever run it.
    pub fn submit(&self, weight: u64, job: Job) -> Result<Ticket, Job> {
        self.submit_in(std::process::id(), weight, job)
    }

    fn submit_in(&self, process: u32, weight: u64, job: Job) -> Result<Ticket, Job> {
        let ticket = Ticket { weight, number: self.tickets.fetch_add(1, Ordering::Relaxed) };
        let shared = self.shared_in(process);
        let mut state = shared.lock();
        // One more job than workers to take them. Counting the queue, not asking whether anybody is idle, matters: a
        // worker that was woken but has not come yet still counts as idle, and has a job waiting for it already.
        if state.queue.len() >= state.idle && state.workers < self.max_workers {
            if let Err(error) = self.grow(&shared, &mut state) {
                if state.workers == 0 {
                    log::warn!("oeq-native: no compiler thread could be started: {error}");
                    return Err(job);
                }
                log::debug!("oeq-native: staying with {} compiler threads: {error}", state.workers);
            }
        }
        // What weighs nothing is no compilation.
        let first = state.load().total == 0;
        state.pace.arrived(Instant::now(), first);
        state.queue.insert(ticket.rank(), Waiting { weight, job });
        drop(state);
        shared.work.notify_one();
        Ok(ticket)
    }

    /// Moves a job before all that nobody waits for. Jobs promoted earlier stay ahead of it, and so does a job that has
    /// started already or was promoted before. All threads begin to work that were held back until more jobs had arrived.
    pub fn promote(&self, ticket: Ticket) {
        let shared = self.shared_in(std::process::id());
        let mut state = shared.lock();
        if let Some(waiting) = state.queue.remove(&ticket.rank()) {
            let place = state.promotions;
            state.promotions += 1;
            state.queue.insert(Rank::Promoted(place), waiting);
        }
        state.pace.awaited();
        drop(state);
        shared.work.notify_all();
    }

    /// How many worker threads there are now.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.shared_in(std::process::id()).lock().workers
    }

    /// How many jobs wait for a worker now.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.shared_in(std::process::id()).lock().queue.len()
    }

    /// The state of that process, made afresh if what is there was inherited through a fork.
    fn shared_in(&self, process: u32) -> Arc<Shared> {
        self.shared.of(process, || Shared::new(self.max_workers))
    }

    fn grow(&self, shared: &Arc<Shared>, state: &mut State) -> io::Result<()> {
        let slot = state.slots.iter().position(|taken| !taken).unwrap_or(state.slots.len());
        let (of_worker, idle) = (Arc::clone(shared), self.idle);
        (self.spawn)(format!("oeq-compile-{slot}"), Box::new(move || work(&of_worker, slot, idle)))?;
        if slot == state.slots.len() {
            state.slots.push(true);
        } else {
            state.slots[slot] = true;
        }
        state.workers += 1;
        state.idle += 1;
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let shared = self.shared_in(std::process::id());
        shared.lock().closed = true;
        shared.work.notify_all();
    }
}

/// A thread that takes no signals and has the stack that the compiler needs.
fn start(name: String, body: Job) -> io::Result<()> {
    static PINNED: Once = Once::new();
    PINNED.call_once(sys::pin);
    let _quiet = sys::BlockedSignals::new();
    thread::Builder::new().name(name).stack_size(STACK).spawn(body).map(drop)
}

/// The life of one worker.
fn work(shared: &Shared, slot: usize, patience: Duration) {
    let mut state = shared.lock();
    loop {
        let wait = match state.next() {
            Ok(Waiting { weight, job }) => {
                state.idle -= 1;
                state.running.push(weight);
                let (last, more) = (state.closed && state.queue.is_empty(), !state.queue.is_empty());
                drop(state);
                if last {
                    shared.work.notify_all();
                } else if more {
                    // Of several that were told of new jobs while these were held back, one may have heard it all.
                    shared.work.notify_one();
                }
                run(job);
                state = shared.lock();
                state.idle += 1;
                if let Some(index) = state.running.iter().position(|running| *running == weight) {
                    state.running.swap_remove(index);
                }
                continue;
            }
            Err(_) if state.closed && state.queue.is_empty() => break,
            Err(held_back) => held_back,
        };
        let (woken, waited) =
            shared.work.wait_timeout(state, wait.unwrap_or(patience)).unwrap_or_else(PoisonError::into_inner);
        state = woken;
        if waited.timed_out() && wait.is_none() && state.queue.is_empty() {
            break;
        }
    }
    state.workers -= 1;
    state.idle -= 1;
    state.slots[slot] = false;
}

fn run(job: Job) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(job)) else { return };
    // What was thrown may panic again when it is dropped, and so may a logger that is not ours.
    let told = catch_unwind(AssertUnwindSafe(move || {
        log::error!("oeq-native: a compilation job panicked: {}", text_of(&*panic));
        drop(panic);
    }));
    if let Err(again) = told {
        mem::forget(again);
    }
}

fn text_of(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)")
}

/// The cores that this process may use, as a number of workers: its affinity mask and the CPU quota of its control
/// groups (either version, rounded up), at least 1, at most [`MOST_DEFAULT_WORKERS`].
#[must_use]
pub fn default_workers() -> usize {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    cores().min(quota(&read).unwrap_or(usize::MAX)).clamp(1, MOST_DEFAULT_WORKERS)
}

/// The cores of the affinity mask.
fn cores() -> usize {
    sys::affinity_cores().or_else(|| thread::available_parallelism().ok().map(usize::from)).unwrap_or(1)
}

/// The smallest CPU quota of the process's control groups and all above them, in whole cores. `None`: unlimited.
fn quota(read: &dyn Fn(&Path) -> Option<String>) -> Option<usize> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    mounts.lines().filter_map(Mount::parse).filter_map(|mount| mount.quota(&groups, read)).min()
}

/// A mounted hierarchy of control groups that can limit CPU time.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    /// The group that is visible at `point`; not `/` inside a container that shares its host's name space.
    root: PathBuf,
    point: PathBuf,
    unified: bool,
}

impl Mount {
    /// Reads a line of `/proc/self/mountinfo`; `None` if it is about something else.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (unescape(place.next()?), unescape(place.next()?));
        let mut kind = kind.split(' ');
        let unified = match kind.next()? {
            "cgroup2" => true,
            "cgroup" if kind.nth(1)?.split(',').any(|option| option == "cpu") => false,
            _ => return None,
        };
        Some(Self { root, point, unified })
    }

    fn quota(&self, groups: &str, read: &dyn Fn(&Path) -> Option<String>) -> Option<usize> {
        let group = groups.lines().find_map(|line| group_of(line, self.unified))?;
        // A group outside the visible part cannot be looked at; the visible root is then the best there is.
        let inside = group.strip_prefix(&self.root).unwrap_or(Path::new(""));
        let limits = inside.ancestors().filter_map(|group| {
            let folder = self.point.join(group);
            if self.unified {
                cores_of_cpu_max(&read(&folder.join("cpu.max"))?)
            } else {
                cores_of_cfs(&read(&folder.join("cpu.cfs_quota_us"))?, &read(&folder.join("cpu.cfs_period_us"))?)
            }
        });
        limits.min()
    }
}

/// The group named by a line of `/proc/self/cgroup`, if the line is about the wanted hierarchy.
fn group_of(line: &str, unified: bool) -> Option<&Path> {
    let mut parts = line.splitn(3, ':');
    let (number, controllers, group) = (parts.next()?, parts.next()?, parts.next()?);
    let wanted = if unified {
        number == "0" && controllers.is_empty()
    } else {
        controllers.split(',').any(|controller| controller == "cpu")
    };
    wanted.then_some(Path::new(group))
}

/// Whole cores from a version 2 `cpu.max`: `max 100000`, or quota and period in microseconds.
fn cores_of_cpu_max(text: &str) -> Option<usize> {
    let (quota, period) = text.trim().split_once(' ')?;
    cores_of_cfs(quota, period)
}

/// Whole cores from a quota and a period; anything but two positive numbers is no limit (-1 is how version 1 says so).
fn cores_of_cfs(quota: &str, period: &str) -> Option<usize> {
    let quota = quota.trim().parse::<u64>().ok().filter(|&quota| quota > 0)?;
    let period = period.trim().parse::<u64>().ok().filter(|&period| period > 0)?;
    usize::try_from(quota.div_ceil(period)).ok()
}

/// Undoes the kernel's octal escapes (`\040` is a space).
fn unescape(text: &str) -> PathBuf {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        plain.push_str(before);
        let byte = after.get(..3).and_then(|code| u8::from_str_radix(code, 8).ok()).filter(u8::is_ascii);
        plain.push(byte.map_or('\\', char::from));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    plain.push_str(rest);
    PathBuf::from(plain)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use std::sync::mpsc::{self, Receiver, Sender};

    use super::*;

    /// A worker's patience that no test outlives.
    const FOR_EVER: Duration = Duration::from_secs(3600);

    fn accepted(result: Result<Ticket, Job>) -> Ticket {
        result.map_err(|_| "the job was given back").unwrap()
    }

    /// Starts threads as usual, and tells when each has started and ended.
    fn observed(events: Sender<String>) -> Box<Spawn> {
        let events = Mutex::new(events);
        Box::new(move |name, body| {
            let events = events.lock().unwrap().clone();
            events.send(format!("start {name}")).unwrap();
            let ended = format!("end {name}");
            let body: Job = Box::new(move || {
                body();
                events.send(ended).unwrap();
            });
            start(name, body)
        })
    }

    /// A job that says that it has begun, and ends when it is told to.
    struct Gate {
        begun: Receiver<()>,
        end: Sender<()>,
    }

    impl Gate {
        fn new() -> (Self, Job) {
            let (report, begun) = mpsc::channel();
            let (end, told) = mpsc::channel::<()>();
            let job = Box::new(move || {
                report.send(()).unwrap();
                told.recv().unwrap();
            });
            (Self { begun, end }, job)
        }
    }

    /// Occupies the only worker of a pool, so that what is submitted next is queued.
    fn occupied(pool: &Pool) -> Gate {
        let (gate, job) = Gate::new();
        accepted(pool.submit(0, job));
        gate.begun.recv().unwrap();
        gate
    }

    fn recorder(log: &Sender<u64>, what: u64) -> Job {
        let log = log.clone();
        Box::new(move || log.send(what).unwrap())
    }

    #[test]
    fn no_thread_exists_before_the_first_job() {
        let (events, seen) = mpsc::channel();
        let pool = Pool::with(4, FOR_EVER, observed(events));
        assert_eq!((pool.workers(), pool.queued()), (0, 0));
        assert!(seen.try_recv().is_err());
        drop(occupied(&pool));
        assert_eq!(seen.recv().unwrap(), "start oeq-compile-0");
    }

    #[test]
    fn the_pool_grows_to_its_maximum_and_no_further() {
        let pool = Pool::with(3, FOR_EVER, Box::new(start));
        let gates: Vec<Gate> = (0..3).map(|_| occupied(&pool)).collect();
        let (log, ran) = mpsc::channel();
        accepted(pool.submit(1, recorder(&log, 7)));
        assert_eq!((pool.workers(), pool.queued()), (3, 1));
        gates[1].end.send(()).unwrap();
        assert_eq!(ran.recv().unwrap(), 7);
        for gate in [&gates[0], &gates[2]] {
            gate.end.send(()).unwrap();
        }
    }

    #[test]
    fn jobs_that_arrive_together_run_together() {
        // Each job waits for all the others: with fewer threads than jobs none would ever end.
        let pool = Pool::with(8, FOR_EVER, Box::new(start));
        for _round in 0..50 {
            let barrier = Arc::new(std::sync::Barrier::new(9));
            for _ in 0..8 {
                let barrier = Arc::clone(&barrier);
                accepted(pool.submit(
                    1,
                    Box::new(move || {
                        barrier.wait();
                    }),
                ));
            }
            barrier.wait();
        }
        assert_eq!(pool.workers(), 8);
    }

    #[test]
    fn an_idle_worker_is_used_before_a_new_one_is_made() {
        let (events, seen) = mpsc::channel();
        let pool = Pool::with(8, FOR_EVER, observed(events));
        let (log, ran) = mpsc::channel();
        for round in 0..20 {
            accepted(pool.submit(1, recorder(&log, round)));
            assert_eq!(ran.recv().unwrap(), round);
            // The worker has sent its word but may not be back for more; its idle count says when it is.
            let shared = pool.shared_in(std::process::id());
            while shared.lock().idle == 0 {
                thread::yield_now();
            }
        }
        assert_eq!(pool.workers(), 1);
        assert_eq!(seen.try_iter().collect::<Vec<_>>(), ["start oeq-compile-0"]);
    }

    #[test]
    fn the_heaviest_goes_first_and_equals_go_in_order() {
        let pool = Pool::with(1, FOR_EVER, Box::new(start));
        let gate = occupied(&pool);
        let (log, ran) = mpsc::channel();
        for (what, weight) in [(1, 5), (2, 9), (3, 5), (4, 9), (5, 0), (6, u64::MAX)] {
            accepted(pool.submit(weight, recorder(&log, what)));
        }
        gate.end.send(()).unwrap();
        drop(log);
        assert_eq!(ran.iter().collect::<Vec<_>>(), [6, 2, 4, 1, 3, 5]);
    }

    #[test]
    fn promoted_jobs_go_before_all_others_in_the_order_of_promotion() {
        let pool = Pool::with(1, FOR_EVER, Box::new(start));
        let gate = occupied(&pool);
        let (log, ran) = mpsc::channel();
        let tickets: Vec<Ticket> = (0..5).map(|what| accepted(pool.submit(100 - what, recorder(&log, what)))).collect();
        for which in [4, 2, 4] {
            pool.promote(tickets[which]);
        }
        assert_eq!(pool.queued(), 5);
        gate.end.send(()).unwrap();
        drop(log);
        assert_eq!(ran.iter().collect::<Vec<_>>(), [4, 2, 0, 1, 3]);
        pool.promote(tickets[0]);
        assert_eq!(pool.queued(), 0);
    }

    #[test]
    fn a_job_that_outweighs_all_others_begins_at_once() {
        let pool = Pool::with(8, FOR_EVER, Box::new(start));
        // One of eight threads works while jobs arrive; each of these is heavier than those before and waits for all.
        let barrier = Arc::new(std::sync::Barrier::new(5));
        for weight in 1..=4 {
            let barrier = Arc::clone(&barrier);
            accepted(pool.submit(
                weight,
                Box::new(move || {
                    barrier.wait();
                }),
            ));
            // So that the burst does not end before the last has come.
            let shared = pool.shared_in(std::process::id());
            while shared.lock().running.len() < usize::try_from(weight).unwrap() {
                thread::yield_now();
            }
        }
        barrier.wait();
    }

    #[test]
    fn jobs_that_were_held_back_begin_by_themselves() {
        let pool = Pool::with(8, FOR_EVER, Box::new(start));
        let gates = [occupied(&pool), occupied(&pool)];
        let (log, ran) = mpsc::channel();
        // As many threads as may work while jobs arrive are taken; these are ten more jobs, each as heavy as its number.
        for what in 1..=10 {
            accepted(pool.submit(what, recorder(&log, what)));
        }
        // Nobody waits for any of them, and no thread is free but those that are held back: they begin by themselves.
        let mut first: Vec<u64> = (0..10).map(|_| ran.recv().unwrap()).collect();
        first.sort_unstable();
        assert_eq!(first, (1..=10).collect::<Vec<_>>());
        for gate in gates {
            gate.end.send(()).unwrap();
        }
    }

    #[test]
    fn who_waits_lets_all_threads_begin() {
        let pool = Pool::with(8, FOR_EVER, Box::new(start));
        // As many jobs as threads, each waiting for all others: none ends unless all run.
        let barrier = Arc::new(std::sync::Barrier::new(9));
        let tickets: Vec<Ticket> = (0..8)
            .map(|_| {
                let barrier = Arc::clone(&barrier);
                accepted(pool.submit(
                    1,
                    Box::new(move || {
                        barrier.wait();
                    }),
                ))
            })
            .collect();
        pool.promote(tickets[7]);
        barrier.wait();
    }

    #[test]
    fn a_panic_costs_its_own_job_only() {
        struct Spiteful;
        impl Drop for Spiteful {
            fn drop(&mut self) {
                std::panic::resume_unwind(Box::new("dropped"));
            }
        }
        let pool = Pool::with(1, FOR_EVER, Box::new(start));
        let gate = occupied(&pool);
        let (log, ran) = mpsc::channel();
        accepted(pool.submit(9, recorder(&log, 1)));
        // resume_unwind panics without the hook, which would print.
        accepted(pool.submit(8, Box::new(|| std::panic::resume_unwind(Box::new("text")))));
        accepted(pool.submit(7, Box::new(|| std::panic::resume_unwind(Box::new(String::from("text"))))));
        accepted(pool.submit(6, Box::new(|| std::panic::resume_unwind(Box::new(Spiteful)))));
        accepted(pool.submit(5, recorder(&log, 2)));
        gate.end.send(()).unwrap();
        drop(log);
        assert_eq!(ran.iter().collect::<Vec<_>>(), [1, 2]);
        assert_eq!(pool.workers(), 1);
    }

    #[test]
    fn an_idle_worker_leaves_and_a_later_job_brings_one_back() {
        let (events, seen) = mpsc::channel();
        let pool = Pool::with(2, Duration::ZERO, observed(events));
        for _ in 0..3 {
            let (log, ran) = mpsc::channel();
            accepted(pool.submit(1, recorder(&log, 1)));
            assert_eq!(ran.recv().unwrap(), 1);
            assert_eq!(seen.recv().unwrap(), "start oeq-compile-0");
            assert_eq!(seen.recv().unwrap(), "end oeq-compile-0");
            assert_eq!(pool.workers(), 0);
        }
    }

    #[test]
    fn a_worker_that_leaves_frees_its_number() {
        let (events, seen) = mpsc::channel();
        let pool = Pool::with(2, Duration::ZERO, observed(events));
        let (first, second) = (occupied(&pool), occupied(&pool));
        first.end.send(()).unwrap();
        let mut names: Vec<String> = (0..3).map(|_| seen.recv().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["end oeq-compile-0", "start oeq-compile-0", "start oeq-compile-1"]);
        let third = occupied(&pool);
        assert_eq!(seen.recv().unwrap(), "start oeq-compile-0");
        for gate in [second, third] {
            gate.end.send(()).unwrap();
        }
    }

    #[test]
    fn without_any_thread_the_job_comes_back() {
        let pool = Pool::with(2, FOR_EVER, Box::new(|_, _| Err(io::Error::from(io::ErrorKind::WouldBlock))));
        let (log, ran) = mpsc::channel();
        let job = pool.submit(1, recorder(&log, 1)).unwrap_err();
        assert_eq!((pool.workers(), pool.queued()), (0, 0));
        job();
        assert_eq!(ran.recv().unwrap(), 1);
    }

    #[test]
    fn when_no_second_thread_can_be_had_the_first_does_everything() {
        let once = AtomicU64::new(0);
        let spawn = move |name, body| match once.fetch_add(1, Ordering::Relaxed) {
            0 => start(name, body),
            _ => Err(io::Error::from(io::ErrorKind::WouldBlock)),
        };
        let pool = Pool::with(4, FOR_EVER, Box::new(spawn));
        let gate = occupied(&pool);
        let (log, ran) = mpsc::channel();
        for what in 0..3 {
            accepted(pool.submit(1, recorder(&log, what)));
        }
        assert_eq!((pool.workers(), pool.queued()), (1, 3));
        gate.end.send(()).unwrap();
        drop(log);
        assert_eq!(ran.iter().collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn every_job_runs_exactly_once_whoever_submits_it() {
        const THREADS: u64 = 4;
        const EACH: u64 = 500;
        // Workers without patience come and go all the time, which is where a job could be lost.
        for patience in [Duration::ZERO, FOR_EVER] {
            let pool = Pool::with(3, patience, Box::new(start));
            let (log, ran) = mpsc::channel();
            thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (pool, log) = (&pool, log.clone());
                    scope.spawn(move || {
                        for number in 0..EACH {
                            let what = thread * EACH + number;
                            let ticket = accepted(pool.submit(what % 7, recorder(&log, what)));
                            if what % 5 == 0 {
                                pool.promote(ticket);
                            }
                        }
                    });
                }
            });
            drop(log);
            let mut all: Vec<u64> = ran.iter().collect();
            all.sort_unstable();
            assert_eq!(all, (0..THREADS * EACH).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_dropped_pool_still_runs_what_it_took() {
        let (events, seen) = mpsc::channel();
        let pool = Pool::with(1, FOR_EVER, observed(events));
        let gate = occupied(&pool);
        let (log, ran) = mpsc::channel();
        accepted(pool.submit(1, recorder(&log, 1)));
        drop(pool);
        gate.end.send(()).unwrap();
        assert_eq!(ran.recv().unwrap(), 1);
        assert_eq!(seen.iter().collect::<Vec<_>>(), ["start oeq-compile-0", "end oeq-compile-0"]);
    }

    #[test]
    fn another_process_starts_afresh_and_leaves_the_old_jobs_alone() {
        struct Witness(Sender<u64>);
        impl Drop for Witness {
            fn drop(&mut self) {
                self.0.send(99).unwrap();
            }
        }
        let here = std::process::id();
        let pool = Pool::with(1, FOR_EVER, Box::new(start));
        let gate = occupied(&pool);
        let (log, ran) = mpsc::channel();
        let witness = Witness(log.clone());
        let old = accepted(pool.submit(1, Box::new(move || drop(witness))));

        // What a child would find: the state of a process that it is not, its lock held by nobody it knows.
        let inherited = pool.shared_in(here);
        let held = inherited.lock();
        let new = accepted(pool.submit_in(here + 1, 1, recorder(&log, 1)));
        assert_eq!(ran.recv().unwrap(), 1);
        assert_ne!(old, new);
        assert_eq!(held.queue.len(), 1);
        drop(held);
        drop(inherited);
        assert!(ran.try_recv().is_err(), "the parent's job was run or dropped by the child");
        gate.end.send(()).unwrap();
        assert_eq!(ran.recv().unwrap(), 99);
    }

    #[test]
    fn workers_are_named_and_take_no_signals() {
        let pool = Pool::new(1);
        let (tell, told) = mpsc::channel();
        accepted(pool.submit(
            1,
            Box::new(move || {
                let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
                tell.send((thread::current().name().map(str::to_owned), status)).unwrap();
            }),
        ));
        let (name, status) = told.recv().unwrap();
        assert_eq!(name.as_deref(), Some("oeq-compile-0"));
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap().trim();
        let blocked = u64::from_str_radix(blocked, 16).unwrap();
        assert_ne!(blocked & 1 << (libc::SIGTERM - 1), 0);
        assert_eq!(blocked & 1 << (libc::SIGSEGV - 1), 0);
    }

    #[test]
    fn the_default_is_within_its_bounds() {
        let workers = default_workers();
        assert!((1..=MOST_DEFAULT_WORKERS).contains(&workers));
        assert!(workers <= sys::affinity_cores().unwrap());
    }

    #[test]
    fn quotas_are_rounded_up_to_whole_cores() {
        assert_eq!(cores_of_cpu_max("max 100000\n"), None);
        assert_eq!(cores_of_cpu_max("250000 100000\n"), Some(3));
        assert_eq!(cores_of_cpu_max("200000 100000\n"), Some(2));
        assert_eq!(cores_of_cpu_max("1000 100000\n"), Some(1));
        assert_eq!(cores_of_cfs("-1\n", "100000\n"), None);
        assert_eq!(cores_of_cfs("150000\n", "100000\n"), Some(2));
        for (quota, period) in [("", "1"), ("1", ""), ("0", "1"), ("1", "0"), ("x", "1"), ("1", "-1")] {
            assert_eq!(cores_of_cfs(quota, period), None, "{quota:?} {period:?}");
        }
        assert_eq!(cores_of_cpu_max("100000"), None);
    }

    /// The quota that a file tree given as (path, content) pairs leads to.
    fn quota_of(files: &[(&str, &str)]) -> Option<usize> {
        quota(&|path| files.iter().find(|file| Path::new(file.0) == path).map(|file| file.1.to_owned()))
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn the_tightest_quota_on_the_way_up_counts() {
        let mut files = vec![
            ("/proc/self/mountinfo", V2),
            ("/proc/self/cgroup", "0::/a/b/c\n"),
            ("/sys/fs/cgroup/a/b/c/cpu.max", "max 100000"),
            ("/sys/fs/cgroup/a/b/cpu.max", "600000 100000"),
            ("/sys/fs/cgroup/a/cpu.max", "300000 100000"),
        ];
        assert_eq!(quota_of(&files), Some(3));
        files.truncate(4);
        assert_eq!(quota_of(&files), Some(6));
        files.truncate(3);
        assert_eq!(quota_of(&files), None);
        assert_eq!(quota_of(&[]), None);
    }

    #[test]
    fn a_container_sees_its_group_as_the_root_of_the_mount() {
        let with_namespace =
            [("/proc/self/mountinfo", V2), ("/proc/self/cgroup", "0::/\n"), ("/sys/fs/cgroup/cpu.max", "50000 100000")];
        assert_eq!(quota_of(&with_namespace), Some(1));
        let without = [
            ("/proc/self/mountinfo", "30 23 0:26 /docker/f00 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"),
            ("/proc/self/cgroup", "0::/docker/f00/inner\n"),
            ("/sys/fs/cgroup/inner/cpu.max", "900000 100000"),
            ("/sys/fs/cgroup/cpu.max", "400000 100000"),
        ];
        assert_eq!(quota_of(&without), Some(4));
        let elsewhere = [
            ("/proc/self/mountinfo", "30 23 0:26 /docker/f00 /sys/fs/cgroup ro - cgroup2 cgroup rw\n"),
            ("/proc/self/cgroup", "0::/system.slice\n"),
            ("/sys/fs/cgroup/cpu.max", "400000 100000"),
        ];
        assert_eq!(quota_of(&elsewhere), Some(4));
    }

    #[test]
    fn the_first_version_is_read_from_its_cpu_hierarchy() {
        let mounts = "28 25 0:24 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n\
                      29 25 0:25 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
                      31 25 0:27 / /sys/fs/cgroup/cpu\\040main rw - cgroup cgroup rw,cpu,cpuacct\n";
        let files = [
            ("/proc/self/mountinfo", mounts),
            ("/proc/self/cgroup", "5:cpuset:/wrong\n4:cpu,cpuacct:/job:7\n0::/unified\n"),
            ("/sys/fs/cgroup/cpu main/job:7/cpu.cfs_quota_us", "150000\n"),
            ("/sys/fs/cgroup/cpu main/job:7/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/cpu main/cpu.cfs_quota_us", "-1\n"),
            ("/sys/fs/cgroup/cpu main/cpu.cfs_period_us", "100000\n"),
            ("/sys/fs/cgroup/cpuset/wrong/cpu.cfs_quota_us", "1\n"),
            ("/sys/fs/cgroup/cpuset/wrong/cpu.cfs_period_us", "1\n"),
        ];
        assert_eq!(quota_of(&files), Some(2));
    }

    #[test]
    fn other_mounts_and_broken_lines_are_passed_over() {
        for line in ["", " - ", "1 2 3 / /proc rw - proc proc rw", "1 2 3:4 / - cgroup2", "a b", "- cgroup2 x"] {
            assert_eq!(Mount::parse(line), None, "{line:?}");
        }
        for line in ["", "0", "0:", "1:name=systemd:/x"] {
            assert_eq!(group_of(line, true), None, "{line:?}");
            assert_eq!(group_of(line, false), None, "{line:?}");
        }
        assert_eq!(unescape(r"a\040b\134c\q\04"), Path::new(r"a b\c\q\04"));
    }
}
