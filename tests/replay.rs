//! The graphs that call sites get after a few calls (`driver/replay.rs`), on a driver that writes down what it is to run:
//! by graphs or by launches, it must be the same.
#![allow(
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    reason = "a failed test should panic; every pointer here is the test's own"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use oeq_native::compile::Image;
use oeq_native::driver::cuda::Cuda;
use oeq_native::driver::replay::Replays;
use oeq_native::driver::{Driver, Function, FunctionSpec, LaunchSpec, Module, Stream, Work, Zero};
use smallvec::SmallVec;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The stand-in, loaded under the driver's name.
struct StandIn(libloading::os::unix::Library);

impl StandIn {
    fn load() -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("replay");
        std::fs::create_dir_all(&folder).unwrap();
        let library = folder.join(format!("libcuda-{}.so.1", std::process::id()));
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/replay/driver.c");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let status = Command::new(compiler)
            .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libcuda.so.1", "-o"])
            .args([&library, &source])
            .arg("-lpthread")
            .status();
        assert!(status.unwrap().success());
        let loaded = unsafe { libloading::os::unix::Library::new(&library) }.unwrap();
        std::fs::remove_file(&library).unwrap();
        Self(loaded)
    }

    fn symbol<T>(&self, name: &str) -> *mut T {
        unsafe { *self.0.get::<*mut T>(name.as_bytes()).unwrap() }
    }

    fn count(&self, what: &str) -> i32 {
        unsafe { (*self.symbol::<AtomicI32>(&format!("stand_in_{what}"))).load(Ordering::SeqCst) }
    }

    fn set(&self, what: &str, value: c_int) {
        unsafe { *self.symbol::<c_int>(&format!("stand_in_{what}")) = value };
    }

    fn fail(&self, function: &str) {
        let name = self.symbol::<[u8; 64]>("stand_in_fails");
        let mut bytes = [0; 64];
        bytes[..function.len()].copy_from_slice(function.as_bytes());
        unsafe { *name = bytes };
    }

    /// What was run since the last time, one kernel a line.
    fn log(&self) -> Vec<String> {
        let take: unsafe extern "C" fn(*mut c_char, usize) -> usize =
            unsafe { std::mem::transmute(self.symbol::<c_void>("stand_in_take_log")) };
        let mut bytes = vec![0_u8; 1 << 20];
        let length = unsafe { take(bytes.as_mut_ptr().cast(), bytes.len()) };
        String::from_utf8_lossy(&bytes[..length]).lines().map(str::to_owned).collect()
    }
}

/// Puts a context on this thread's stack.
fn push(world: &World, context: usize) {
    let push: unsafe extern "C" fn(usize) -> c_int =
        unsafe { std::mem::transmute(world.stand_in.symbol::<c_void>("cuCtxPushCurrent_v2")) };
    assert_eq!(unsafe { push(context) }, 0);
}

/// How many contexts are on this thread's stack, and its capture mode.
fn thread_state(world: &World) -> (c_int, c_int) {
    let state: unsafe extern "C" fn(*mut c_int, *mut c_int) =
        unsafe { std::mem::transmute(world.stand_in.symbol::<c_void>("stand_in_thread")) };
    let (mut contexts, mut mode) = (-1, -1);
    unsafe { state(&raw mut contexts, &raw mut mode) };
    (contexts, mode)
}

struct World {
    stand_in: StandIn,
    cuda: Cuda,
    _module: Box<dyn Module>,
    functions: Vec<Function>,
}

/// The stand-in is one for the whole process, and so are its counts.
fn world() -> MutexGuard<'static, World> {
    static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
    let world = WORLD.get_or_init(|| {
        let stand_in = StandIn::load();
        let cuda = Cuda::default();
        let image = Image { code: vec![1], symbols: Vec::new(), log: String::new() };
        let spec = |name| FunctionSpec { entry: name, symbol: name, shared_bytes: 16 };
        let module = cuda.load(0, &image, &[spec("first"), spec("second")]).unwrap();
        let functions = vec![module.function(0).unwrap(), module.function(1).unwrap()];
        Mutex::new(World { stand_in, cuda, _module: module, functions })
    });
    let world = world.lock().unwrap_or_else(PoisonError::into_inner);
    for what in ["capturing", "quiet", "launches", "graph_launches", "parameters_set", "overlaps"] {
        world.stand_in.set(what, 0);
    }
    world.stand_in.fail("");
    world.stand_in.log();
    world
}

const STREAM: Stream = Stream(0x5000 as *mut c_void);

/// A call with five zeroed results and two launches; `addresses` are those of the results and of a parameter of each.
fn launches() -> [LaunchSpec; 2] {
    let launch = |entry, first: usize| LaunchSpec {
        entry,
        blocks: 7,
        threads: 64,
        shared_bytes: 16,
        words: first..first + 3,
        parameters: SmallVec::from_slice(&[0, 1, 2]),
    };
    [launch("first", 0), launch("second", 3)]
}

fn call(world: &World, replays: Option<&Replays>, ordinal: u32, stream: Stream, addresses: [u64; 3]) {
    let [result, one, two] = addresses;
    let zeros: Vec<Zero> = (0..5).map(|i| Zero { address: result + i * 0x10000, bytes: 5000 + i }).collect();
    let (launches, words) = (launches(), [one, 11, 12, two, 21, 22]);
    let work = Work { zeros: &zeros, launches: &launches, functions: &world.functions, words: &words, replays };
    let before = thread_state(world);
    unsafe { world.cuda.enqueue(ordinal, stream, &work) }.unwrap();
    assert_eq!(thread_state(world), before, "a call leaves its thread as it was");
}

/// What a call must run, as launches do it.
fn expected(world: &World, addresses: [u64; 3]) -> Vec<String> {
    call(world, None, 0, STREAM, addresses);
    let log = world.stand_in.log();
    assert_eq!(log.len(), 4, "{log:?}");
    assert!(log[0].starts_with("oeq_zero_fill") && log[1].starts_with("oeq_zero_fill"), "{log:?}");
    assert!(log[2].starts_with("first<7,64,16>") && log[3].starts_with("second<7,64,16>"), "{log:?}");
    assert!(log.iter().all(|line| line.ends_with(" @5000 in 100")), "{log:?}");
    log
}

/// A site that has its graph.
fn replayed(world: &World) -> Replays {
    let replays = Replays::default();
    for _ in 0..8 {
        call(world, Some(&replays), 0, STREAM, [1 << 20, 2 << 20, 3 << 20]);
    }
    assert!(world.stand_in.count("graph_launches") > 0);
    world.stand_in.log();
    replays
}

#[test]
fn after_a_few_calls_a_graph_runs_the_same() {
    let world = world();
    let sites = [[1 << 20, 2 << 20, 3 << 20], [1 << 20, 2 << 20, 4 << 20], [5 << 20, 2 << 20, 4 << 20], [9, 10, 11]];
    let wanted: Vec<_> = sites.iter().map(|addresses| expected(&world, *addresses)).collect();
    let replays = Replays::default();
    let count = |what| world.stand_in.count(what);
    let before = count("launches");
    for _ in 0..4 {
        call(&world, Some(&replays), 0, STREAM, sites[0]);
        assert_eq!(world.stand_in.log(), wanted[0]);
    }
    assert_eq!((count("launches") - before, count("graph_launches")), (16, 0));
    // The same addresses: nothing but the graph. One new parameter, new results, everything new: that many kernels' more.
    for (site, set) in [(0, 0), (0, 0), (1, 1), (2, 2), (2, 0), (3, 4), (0, 4)] {
        let (launches, parameters, graphs) = (count("launches"), count("parameters_set"), count("graph_launches"));
        call(&world, Some(&replays), 0, STREAM, sites[site]);
        assert_eq!(world.stand_in.log(), wanted[site]);
        assert_eq!(count("launches"), launches, "launched although there is a graph");
        assert_eq!((count("parameters_set") - parameters, count("graph_launches") - graphs), (set, 1), "site {site}");
    }
}

#[test]
fn a_capture_gets_launches_and_so_does_another_stream_or_device() {
    let world = world();
    let wanted = expected(&world, [7, 8, 9]);
    let count = |what| world.stand_in.count(what);
    let replays = Replays::default();
    world.stand_in.set("capturing", 1);
    for _ in 0..8 {
        call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
        assert_eq!(world.stand_in.log(), wanted);
    }
    assert_eq!((count("graph_launches"), count("graphs")), (0, 0));
    world.stand_in.set("capturing", 0);
    call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
    assert_eq!((count("graph_launches"), world.stand_in.log()), (1, wanted.clone()));
    // There is a graph, and it stays out of a capture and off other streams and devices.
    world.stand_in.set("capturing", 1);
    call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
    assert_eq!((count("graph_launches"), world.stand_in.log()), (1, wanted.clone()));
    world.stand_in.set("capturing", 0);
    world.stand_in.fail("cuStreamIsCapturing");
    call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
    world.stand_in.fail("");
    assert_eq!((count("graph_launches"), world.stand_in.log()), (1, wanted));
    call(&world, Some(&replays), 0, Stream(0x6000 as *mut c_void), [7, 8, 9]);
    let log = world.stand_in.log();
    assert_eq!((count("graph_launches"), log.len()), (1, 4));
    assert!(log.iter().all(|line| line.ends_with(" @6000 in 100")), "{log:?}");
    call(&world, Some(&replays), 1, STREAM, [7, 8, 9]);
    let log = world.stand_in.log();
    assert_eq!((count("graph_launches"), log.len()), (1, 5 + 2));
    assert!(log.iter().all(|line| line.ends_with(" @5000 in 101")), "{log:?}");
}

#[test]
fn a_graph_moves_to_the_stream_that_is_left() {
    let world = world();
    let replays = replayed(&world);
    let other = Stream(0x6000 as *mut c_void);
    let by_graph = |stream| {
        let before = world.stand_in.count("graph_launches");
        call(&world, Some(&replays), 0, stream, [7, 8, 9]);
        let (log, place) = (world.stand_in.log(), format!(" @{:x} in 100", stream.0 as usize));
        assert!(log.len() == 4 && log.iter().all(|line| line.ends_with(&place)), "{log:?}");
        world.stand_in.count("graph_launches") - before
    };
    // In turns it stays where it was made.
    let turns: Vec<i32> = [other, other, STREAM, other, other, STREAM].map(by_graph).into();
    assert_eq!(turns, [0, 0, 1, 0, 0, 1]);
    let moves: Vec<i32> = [other, other, other, other, other, STREAM].map(by_graph).into();
    assert_eq!(moves, [0, 0, 0, 1, 1, 0]);
}

#[test]
fn a_site_that_took_anothers_place_waits_until_a_graph_pays() {
    let world = world();
    let replays = Replays::after_change();
    for calls in 1..=300 {
        call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
        assert_eq!(world.stand_in.count("graph_launches"), (calls - 256).max(0), "{calls}");
    }
    world.stand_in.log();
}

#[test]
fn a_graph_that_fails_costs_no_call() {
    let world = world();
    let wanted = expected(&world, [7, 8, 9]);
    for function in ["cuGraphCreate", "cuGraphAddKernelNode", "cuGraphInstantiateWithFlags", "cuGraphLaunch"] {
        let replays = Replays::default();
        world.stand_in.fail(function);
        for _ in 0..6 {
            call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
            assert_eq!(world.stand_in.log(), wanted, "{function}");
        }
        world.stand_in.fail("");
        call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
        assert_eq!(world.stand_in.log(), wanted, "{function}");
        assert_eq!((world.stand_in.count("graph_launches"), world.stand_in.count("graphs")), (0, 0), "{function}");
    }
    for function in ["cuGraphExecKernelNodeSetParams", "cuGraphLaunch"] {
        let replays = replayed(&world);
        world.stand_in.fail(function);
        call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
        world.stand_in.fail("");
        assert_eq!(world.stand_in.log(), wanted, "{function}");
        assert_eq!(world.stand_in.count("graphs"), 0, "{function}");
        call(&world, Some(&replays), 0, STREAM, [7, 8, 9]);
        assert_eq!(world.stand_in.log(), wanted, "{function}");
    }
}

#[test]
fn a_context_of_the_callers_stays_current() {
    let world = world();
    // On a thread of its own: its stack of contexts goes with it.
    std::thread::scope(|scope| {
        let world = &*world;
        scope.spawn(|| {
            let wanted = expected(world, [7, 8, 9]);
            push(world, 0x999);
            let replays = replayed(world);
            for _ in 0..2 {
                call(world, Some(&replays), 0, STREAM, [7, 8, 9]);
                assert_eq!(world.stand_in.log(), wanted);
            }
            drop(replays);
            assert_eq!(thread_state(world), (1, 0));
        });
    });
}

#[test]
fn a_graph_goes_with_its_site() {
    let world = world();
    let replays = replayed(&world);
    assert_eq!(world.stand_in.count("graphs"), 2);
    drop(replays);
    assert_eq!(world.stand_in.count("graphs"), 0);
}

#[test]
fn threads_share_a_site_without_sharing_its_graph_at_a_time() {
    let world = world();
    let replays = replayed(&world);
    let (threads, calls) = (4, 500);
    let calls_before = world.stand_in.count("launches") / 4 + world.stand_in.count("graph_launches");
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (world, replays) = (&*world, &replays);
            scope.spawn(move || {
                for index in 0..calls {
                    call(world, Some(replays), 0, STREAM, [thread << 40 | index << 20, thread, index]);
                }
            });
        }
    });
    // Each whole call is there once, its kernels in order, whoever ran it; overlapping calls may mix by launches only.
    let log = world.stand_in.log();
    assert_eq!(log.len() as u64, 4 * threads * calls);
    for thread in 0..threads {
        for index in [0, calls / 2, calls - 1] {
            let line = format!("first<7,64,16> {thread:x} b c @5000 in 100");
            assert_eq!(log.iter().filter(|entry| **entry == line).count() as u64, calls, "{line}");
            assert!(log.contains(&format!("second<7,64,16> {index:x} 15 16 @5000 in 100")));
        }
    }
    assert_eq!(world.stand_in.count("overlaps"), 0);
    let calls_now = world.stand_in.count("launches") / 4 + world.stand_in.count("graph_launches");
    assert_eq!(u64::try_from(calls_now - calls_before).unwrap(), threads * calls);
}

#[test]
fn a_warm_call_by_graph_allocates_nothing() {
    let world = world();
    let replays = replayed(&world);
    world.stand_in.set("quiet", 1);
    let (zeros, launches) = ([Zero { address: 1, bytes: 5000 }; 5], launches());
    for (address, words) in [(1 << 20, [2 << 20, 11, 12, 3 << 20, 21, 22]), (7, [8, 11, 12, 9, 21, 22])] {
        let zeros = zeros.map(|zero| Zero { address, ..zero });
        let work = Work {
            zeros: &zeros,
            launches: &launches,
            functions: &world.functions,
            words: &words,
            replays: Some(&replays),
        };
        let (graphs, before) = (world.stand_in.count("graph_launches"), ALLOCATIONS.with(Cell::get));
        unsafe { world.cuda.enqueue(0, STREAM, &work) }.unwrap();
        let after = ALLOCATIONS.with(Cell::get);
        assert_eq!((after - before, world.stand_in.count("graph_launches") - graphs), (0, 1));
    }
}
