//! The host platform: the C++ compiler and the device by themselves, and both under a stand-in XLA, beside another platform.
#![cfg(feature = "host")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_precision_loss,
    clippy::float_cmp,
    reason = "a failed test should panic; kernels and the C surface are called as XLA would; small whole numbers are exact"
)]

mod common;

use std::ffi::CStr;
use std::sync::{Arc, Mutex};

use common::*;
use oeq_native::compile::host::HostCompiler;
use oeq_native::compile::{Architecture, Bundle, Compiler, Image, Program};
use oeq_native::driver::host::{Host, Lender, Task, Threads};
use oeq_native::driver::{Driver, Function, FunctionSpec, LaunchSpec, Stream, Work, Zero};
use oeq_native::xla::ffi;
use oeq_native::{Error, Runtime, capi};

/// Kernels that show what lanes, warps and blocks see.
const SOURCE: &str = r"
struct Pair { float* a; unsigned long n; };
__global__ void __launch_bounds__(64) where(unsigned* out) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = ((gridDim.x * 100 + blockDim.x) * 100 + blockIdx.x) * 100 + threadIdx.x;
}
// Each lane's value reaches the lanes below it through a tree, and all lanes through shared memory.
__global__ void sums(Pair pair, double* shuffled, double* shared) {
    extern __shared__ double s[];
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, first = threadIdx.x - lane;
    double value = i < pair.n ? pair.a[i] : 0;
    s[threadIdx.x] = value;
    __syncwarp();
    double sum = 0;
    for (unsigned other = first; other < min(first + 32, blockDim.x); other++) sum += s[other];
    shared[i] = sum;
    #pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffff, value, offset);
    shuffled[i] = value;
}
__global__ void count(float* f, double* d, double* before) {
    atomicAdd(f, 1.0f);
    before[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(d, 0.5);
}
__global__ void some_leave_early(int* order) {
    if (threadIdx.x % 2) return;
    for (int turn = 0; turn < 3; turn++) {
        order[(turn + 1) * 32 + threadIdx.x] = order[turn * 32 + (threadIdx.x + 2) % 32] + 1;
        __syncwarp();
    }
}
// Two blocks that are run at the same time meet; those that are run one after the other do not, and say so at last.
__global__ void meet(float* came, float* met, unsigned long patience) {
    atomicAdd(came, 1.0f);
    float others = 0;
    for (unsigned long i = 0; i < patience && others < 2; i++) others = atomicAdd(came, 0.0f);
    met[blockIdx.x] = others;
}
";
const ENTRIES: [&str; 5] = ["where", "sums", "count", "some_leave_early", "meet"];

fn compile(source: &str, entry_points: &[&str]) -> Result<Image, Error> {
    HostCompiler::new(None).compile(&Program {
        name: "test.cu",
        source,
        architecture: Architecture::HOST,
        entry_points,
        extra_options: &[],
    })
}

/// A stand-in's pool, as the device knows it.
struct Lent(FakePool);

impl Lender for Lent {
    fn threads(&self) -> usize {
        usize::try_from(self.0.threads).unwrap()
    }

    unsafe fn lend(&self, task: Task, data: *mut std::ffi::c_void) -> Result<(), Error> {
        (self.0.schedule)(FakeTask::new(task, data)).map_err(|_| Error::precondition("the pool is closing"))
    }
}

/// A pool of real threads, which end with it.
struct RealPool {
    pool: FakePool,
    workers: Vec<std::thread::JoinHandle<usize>>,
}

impl RealPool {
    fn new(threads: i64) -> Self {
        let (send, receive) = std::sync::mpsc::channel::<FakeTask>();
        let receive = Arc::new(Mutex::new(receive));
        let worker = |_| {
            let receive = Arc::clone(&receive);
            std::thread::spawn(move || {
                let mut ran = 0;
                loop {
                    let task = receive.lock().unwrap().recv();
                    let Ok(task) = task else { return ran };
                    task.run();
                    ran += 1;
                }
            })
        };
        let workers = (0..threads).map(worker).collect();
        Self {
            pool: FakePool { threads, schedule: Arc::new(move |task| send.send(task).map_err(|lost| lost.0)) },
            workers,
        }
    }

    /// How many tasks its threads ran, when they have run all.
    fn ran(self) -> usize {
        drop(self.pool);
        self.workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    }
}

/// A pool whose tasks are kept and run when a test says so.
fn late(threads: i64) -> (FakePool, Arc<Mutex<Vec<FakeTask>>>) {
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keep = Arc::clone(&kept);
    let schedule = Arc::new(move |task| {
        keep.lock().unwrap().push(task);
        Ok(())
    });
    (FakePool { threads, schedule }, kept)
}

struct Loaded {
    host: Host,
    module: Box<dyn oeq_native::driver::Module>,
}

impl Loaded {
    fn new(threads: usize, image: &Image) -> Self {
        let specs: Vec<FunctionSpec<'_>> =
            image.symbols.iter().map(|(entry, symbol)| FunctionSpec { entry, symbol, shared_bytes: 4096 }).collect();
        let host = Host::new(threads);
        assert_eq!(host.architectures().unwrap(), [Architecture::HOST]);
        let module = host.load(0, image, &specs).unwrap();
        Self { host, module }
    }

    /// Runs an entry point with parameters of the given words each.
    fn run(&self, entry: &'static str, grid: (u32, u32), zeros: &[Zero], parameters: &[&[u64]]) {
        self.run_on(None, entry, grid, zeros, parameters);
    }

    /// The same on threads of a pool.
    fn run_on(
        &self,
        pool: Option<&FakePool>,
        entry: &'static str,
        (blocks, threads): (u32, u32),
        zeros: &[Zero],
        parameters: &[&[u64]],
    ) {
        let index = ENTRIES.iter().position(|name| *name == entry).unwrap();
        let words = parameters.concat();
        let starts = parameters.iter().scan(0_u8, |at, words| {
            let start = *at;
            *at += u8::try_from(words.len()).unwrap();
            Some(start)
        });
        let launch = LaunchSpec {
            entry,
            blocks,
            threads,
            shared_bytes: 4096,
            words: 0..words.len(),
            parameters: starts.collect(),
        };
        let functions: [Function; 1] = [self.module.function(index).unwrap()];
        let work = Work { zeros, launches: &[launch], functions: &functions, words: &words, replays: None };
        let lent = pool.map(|pool| Lent(pool.clone()));
        let lent = lent.as_ref().map(|lent| Threads(lent));
        let stream = lent.as_ref().map_or(Stream(std::ptr::null_mut()), Threads::as_stream);
        unsafe { self.host.enqueue(0, stream, &work).unwrap() };
    }

    /// How many blocks of two saw each other.
    fn meet(&self, pool: Option<&FakePool>, patience: u64) -> usize {
        let (mut came, mut met) = ([0_f32], [-1_f32; 2]);
        let parameters = [address(&mut came), address(&mut met), patience];
        self.run_on(pool, "meet", (2, 1), &[], &parameters.each_ref().map(std::slice::from_ref));
        assert_eq!(came, [2.0], "a block did not run, or ran twice");
        // The second of two that run one after the other sees both.
        met.iter().filter(|others| **others == 2.0).count()
    }
}

fn address<T>(of: &mut [T]) -> u64 {
    of.as_mut_ptr() as u64
}

#[test]
fn lanes_warps_and_blocks_see_what_they_would_on_a_gpu() {
    let image = compile(SOURCE, &ENTRIES).unwrap();
    for team in [1, 2, 5] {
        let loaded = Loaded::new(team, &image);
        // Whole warps, one whole and one partial, and a partial one alone.
        for (blocks, threads) in [(3_u32, 64_u32), (7, 40), (2, 8), (1, 1), (90, 96)] {
            let total = (blocks * threads) as usize;
            let mut out = vec![0_u32; total];
            loaded.run("where", (blocks, threads), &[], &[&[address(&mut out)]]);
            for (i, value) in (0_u32..).zip(&out) {
                assert_eq!(*value, ((blocks * 100 + threads) * 100 + i / threads) * 100 + i % threads);
            }

            let mut values: Vec<f32> = (0..total).map(|i| (i % 50) as f32).collect();
            let (mut shuffled, mut shared) = (vec![f64::NAN; total], vec![f64::NAN; total]);
            let pair = [address(&mut values), total as u64];
            loaded.run("sums", (blocks, threads), &[], &[&pair, &[address(&mut shuffled)], &[address(&mut shared)]]);
            for block in values
                .chunks(threads as usize)
                .zip(shuffled.chunks(threads as usize))
                .zip(shared.chunks(threads as usize))
            {
                let ((values, shuffled), shared) = block;
                for ((values, shuffled), shared) in values.chunks(32).zip(shuffled.chunks(32)).zip(shared.chunks(32)) {
                    let sum: f64 = values.iter().map(|value| f64::from(*value)).sum();
                    assert!(shared.iter().all(|value| *value == sum), "{shared:?} {sum}");
                    if values.len() == 32 {
                        assert_eq!(shuffled[0], sum);
                    }
                }
            }

            let (mut f, mut d, mut before) = ([7_f32], [0.25_f64], vec![f64::NAN; total]);
            let zeros = [Zero { address: address(&mut f), bytes: 4 }];
            let parameters = [address(&mut f), address(&mut d), address(&mut before)];
            loaded.run("count", (blocks, threads), &zeros, &parameters.each_ref().map(std::slice::from_ref));
            assert_eq!((f[0], d[0]), (total as f32, 0.25 + total as f64 / 2.0));
            // Every addition saw another sum: none was lost.
            before.sort_by(f64::total_cmp);
            assert!(before.iter().zip(0..).all(|(value, i)| *value == 0.25 + f64::from(i) / 2.0));
        }
    }
}

/// More than any machine needs to start a thread, in turns of an atomic addition; and what is soon over.
const LONG: u64 = 1 << 33;
const SHORT: u64 = 1 << 12;

#[test]
fn lent_threads_work_on_a_grid_and_no_others_do() {
    let image = compile(SOURCE, &ENTRIES).unwrap();
    let loaded = Loaded::new(2, &image);
    assert_eq!(loaded.meet(None, LONG), 2, "the device's own team");
    let real = RealPool::new(3);
    assert_eq!(loaded.meet(Some(&real.pool), LONG), 2, "lent threads");
    assert_eq!(real.ran(), 1, "two threads of the most allowed, the caller one of them");

    // The caller works alone when nobody comes, even if the device's own team could: it is not asked.
    let (pool, kept) = late(3);
    assert_eq!(loaded.meet(Some(&pool), SHORT), 1);
    assert_eq!(kept.lock().unwrap().len(), 1);

    // The most threads holds for lent ones, and so does the number that is lent.
    for (most, lent, asked) in [(1, 8, 0), (4, 8, 3), (16, 2, 2), (90, 90, 6)] {
        let (pool, kept) = late(lent);
        let loaded = Loaded::new(most, &image);
        let mut out = [0_u32; 7];
        loaded.run_on(Some(&pool), "where", (7, 1), &[], &[&[address(&mut out)]]);
        assert!(out.iter().all(|value| *value > 0));
        assert_eq!(kept.lock().unwrap().len(), asked, "{most} {lent}");
    }

    // A pool that takes nothing leaves the work to the device's own team.
    let refusing = FakePool { threads: 3, schedule: Arc::new(Err) };
    assert_eq!(loaded.meet(Some(&refusing), LONG), 2);

    // One that runs tasks at once, on the calling thread, has run everything before the caller begins.
    let at_once = FakePool {
        threads: 3,
        schedule: Arc::new(|task: FakeTask| {
            task.run();
            Ok(())
        }),
    };
    assert_eq!(loaded.meet(Some(&at_once), SHORT), 1);
}

#[test]
fn a_task_that_begins_late_touches_nothing_that_is_gone() {
    let image = compile(SOURCE, &ENTRIES).unwrap();
    let (pool, kept) = late(4);
    let mut sum = [0_f32];
    {
        let loaded = Loaded::new(5, &image);
        let (mut d, mut before) = ([0_f64], vec![0_f64; 64 * 90]);
        let parameters = [address(&mut sum), address(&mut d), address(&mut before)];
        loaded.run_on(Some(&pool), "count", (90, 64), &[], &parameters.each_ref().map(std::slice::from_ref));
        drop(pool);
    }
    // The kernel is unloaded, the device and its memory are gone, and the parameters are those of a call long past.
    assert_eq!(sum, [64.0 * 90.0]);
    let tasks = std::mem::take(&mut *kept.lock().unwrap());
    assert_eq!(tasks.len(), 4);
    let threads: Vec<_> = tasks.into_iter().map(|task| std::thread::spawn(|| task.run())).collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(sum, [64.0 * 90.0]);
}

/// A task that is a boxed closure.
unsafe extern "C" fn call_it(work: *mut std::ffi::c_void) {
    unsafe { Box::from_raw(work.cast::<Box<dyn FnOnce() + Send>>())() }
}

#[test]
fn a_pool_whose_threads_all_make_calls_themselves_does_not_stop() {
    let image = compile(SOURCE, &ENTRIES).unwrap();
    let loaded = Arc::new(Loaded::new(4, &image));
    for threads in [1, 2] {
        let real = RealPool::new(threads);
        let (done, wait) = std::sync::mpsc::channel();
        // As many calls as threads and more, each on a thread of the pool, each asking the pool for help.
        for call in 0..10 * u32::try_from(threads).unwrap() {
            let (loaded, pool, done) = (Arc::clone(&loaded), real.pool.clone(), done.clone());
            let work: Box<dyn FnOnce() + Send> = Box::new(move || {
                let mut out = vec![0_u32; 20 * 32];
                loaded.run_on(Some(&pool), "where", (20, 32), &[], &[&[address(&mut out)]]);
                drop(pool);
                done.send((call, out.iter().all(|value| *value > 0))).unwrap();
            });
            let data = Box::into_raw(Box::new(work)).cast();
            assert!((real.pool.schedule)(FakeTask::new(call_it, data)).is_ok());
        }
        drop(done);
        let mut calls: Vec<(u32, bool)> = wait.iter().collect();
        calls.sort_unstable();
        assert!(calls.iter().zip(0..).all(|((call, right), index)| *call == index && *right), "{calls:?}");
        assert_eq!(calls.len(), 10 * usize::try_from(threads).unwrap());
        assert!(real.ran() >= calls.len());
    }
}

#[test]
fn lanes_that_end_early_hold_nobody_up() {
    let loaded = Loaded::new(1, &compile(SOURCE, &ENTRIES).unwrap());
    let mut order = [0_i32; 128];
    loaded.run("some_leave_early", (1, 32), &[], &[&[address(&mut order)]]);
    for (turn, lanes) in (0..).zip(order.chunks(32)) {
        for (lane, value) in lanes.iter().enumerate() {
            assert_eq!(*value, if lane % 2 == 0 { turn } else { 0 }, "turn {turn}, lane {lane}");
        }
    }
}

#[test]
fn programs_that_cannot_be_are_errors_with_the_compilers_words() {
    let error = compile("__global__ void forward(float* x) {\n  x[0] = nonsense;\n}\n", &["forward"]).unwrap_err();
    assert!(error.message().contains("test.cu:2:") && error.message().contains("nonsense"), "{error}");
    let large = "__global__ void forward(char* x) { volatile char big[1 << 20]; big[blockIdx.x] = 1; x[0] = big[3]; }";
    let error = compile(large, &["forward"]).unwrap_err();
    assert!(error.message().contains("frame"), "{error}");
    let error = compile(SOURCE, &["where); system(\"touch pwned\""]).unwrap_err();
    assert!(error.message().contains("not a name"), "{error}");
    let error = HostCompiler::new(None)
        .compile(&Program {
            name: "test.cu",
            source: SOURCE,
            architecture: "sm_90".parse().unwrap(),
            entry_points: &["where"],
            extra_options: &[],
        })
        .unwrap_err();
    assert!(error.message().contains("sm_90"), "{error}");
    let broken = Image { code: b"not a library".to_vec(), symbols: Vec::new(), log: String::new() };
    let error = Host::new(1).load(0, &broken, &[]).err().unwrap();
    assert!(error.message().contains("cannot be loaded"), "{error}");
}

/// A tensor product that is none: sums and products of small whole numbers.
fn payload() -> String {
    let source = r"
__global__ void forward(size_t n, float* l1, float* l2, float* l3, float* w) {
    extern __shared__ char s[];
    const int t = blockIdx.x * blockDim.x + threadIdx.x, lane_id = t % 32;
    float* own = (float*)s + threadIdx.x / 32 * 32;
    for (size_t i = t / 32; i < n; i += gridDim.x * blockDim.x / 32) {
        own[lane_id] = lane_id < 6 ? l1[i * 6 + lane_id] : 0;
        __syncwarp();
        float sum = 0;
        for (int k = 0; k < 6; k++) sum += own[k];
        if (lane_id < 10) l3[i * 10 + lane_id] = sum * w[i * 8 + lane_id % 8] + l2[i * 4 + lane_id % 4];
        __syncwarp();
    }
}
__global__ void backward(size_t n, float* l1, float* l1_grad, float* l2, float* l2_grad, float* w, float* w_grad, float* l3_grad) {
    const int t = blockIdx.x * blockDim.x + threadIdx.x, lane_id = t % 32;
    for (size_t i = t / 32; i < n; i += gridDim.x * blockDim.x / 32) atomicAdd(l2_grad + i * 4 + lane_id % 4, 1.0f);
}
__global__ void double_backward_A() {}
__global__ void double_backward_B() {}
";
    let text = PayloadSpec { mark: "on the host", ..PayloadSpec::default() }.json();
    let mut object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
    object.insert("kernel".into(), source.into());
    serde_json::Value::Object(object).to_string()
}

fn host_bundle(target: &str) -> ffi::HandlerBundle {
    oeq_native::registry::table().unwrap().find(target).unwrap().host_bundle
}

#[test]
fn the_same_payload_runs_on_two_platforms_of_one_process() {
    const N: usize = 5;
    let n = i64::try_from(N).unwrap();
    let world = world();
    let payload = payload();
    for minor in 1..=5 {
        let mut l1: Vec<f32> = (0..N * 6).map(|i| i as f32).collect();
        let mut l2: Vec<f32> = (0..N * 4).map(|i| 1000.0 * i as f32).collect();
        let mut w: Vec<f32> = (0..N * 8).map(|i| (i % 3) as f32).collect();
        let mut l3 = vec![f32::NAN; N * 10];
        let operands =
            vec![f32s(address(&mut l1), &[n, 6]), f32s(address(&mut l2), &[n, 4]), f32s(address(&mut w), &[n, 8])];
        let mut site = Site::new(minor, &payload, 5).with(operands.clone(), vec![f32s(address(&mut l3), &[n, 10])]);
        site.context.stream = None;
        site.call(host_bundle("tp_forward").instantiate, false).unwrap();
        assert!(site.context.state.is_some());
        // Without threads of XLA's, and with some of each kind.
        let (late, kept) = late(2);
        let real = RealPool::new(2);
        for pool in [None, Some(&real.pool), Some(&late), Some(&FakePool { threads: 0, ..late.clone() })] {
            site.context.pool = pool.cloned();
            l3.fill(f32::NAN);
            site.call(host_bundle("tp_forward").execute, true).unwrap();
            for (i, value) in l3.iter().enumerate() {
                let (row, column) = (i / 10, i % 10);
                let sum: f32 = l1[row * 6..row * 6 + 6].iter().sum();
                assert_eq!(*value, sum * w[row * 8 + column % 8] + l2[row * 4 + column % 4], "{row} {column}");
            }
        }
        site.context.pool = None;
        // As many as the options allow besides the caller; those that were late find nothing to do.
        let asked = Runtime::host().unwrap().config().host_threads.min(3) - 1;
        let tasks = std::mem::take(&mut *kept.lock().unwrap());
        assert_eq!((tasks.len(), real.ran()), (asked, asked));
        tasks.into_iter().for_each(FakeTask::run);

        // Without a state, with results that have to be zeroed first.
        let (mut g1, mut g2, mut gw, mut g3) =
            (vec![f32::NAN; N * 6], vec![f32::NAN; N * 4], vec![f32::NAN; N * 8], vec![0_f32; N * 10]);
        let mut with_grad = operands.clone();
        with_grad.push(f32s(address(&mut g3), &[n, 10]));
        let results =
            vec![f32s(address(&mut g1), &[n, 6]), f32s(address(&mut g2), &[n, 4]), f32s(address(&mut gw), &[n, 8])];
        let mut site = Site::new(minor, &payload, 5).with(with_grad, results);
        site.context.stream = None;
        site.call(host_bundle("tp_backward").execute, true).unwrap();
        assert!(g1.iter().chain(&gw).all(|value| *value == 0.0) && g2.iter().all(|value| *value == 8.0), "{g2:?}");

        // The other platform's call of the same payload goes to the other device.
        let mut site = Site::new(minor, &payload, 5).with(operands, vec![f32s(0x3000, &[n, 10])]);
        let stream = 0x40_0000 + u64::try_from(minor).unwrap();
        site.context.stream = Some(stream);
        site.run("tp_forward").unwrap();
        assert_eq!(world.take(stream).len(), 1);
    }
    assert_eq!(world.take(0).len(), 0);
    let stats = Runtime::host().unwrap().stats();
    assert_eq!(stats, Runtime::global().unwrap().stats());
}

#[test]
fn a_plain_symbol_runs_where_the_frame_comes_from() {
    const N: usize = 5;
    let n = i64::try_from(N).unwrap();
    let world = world();
    let (pool, kept) = late(4);
    // One payload, one shape, one function: what differs is the frame, and at one place in memory the payload.
    let payloads =
        ["left here", "left Here"].map(|mark| payload().replacen("__global__", &format!("/* {mark} */ __global__"), 1));
    assert_ne!(payloads[0], payloads[1]);
    let symbol = oeq_native::registry::table().unwrap().find("tp_forward").unwrap().stateless;
    for (round, minor) in (1..=5).chain(1..=5).enumerate() {
        let payload = &payloads[round % 2];
        let mut l1: Vec<f32> = (0..N * 6).map(|i| i as f32).collect();
        let (mut l2, mut w) = (vec![round as f32; N * 4], vec![2_f32; N * 8]);
        let mut l3 = vec![f32::NAN; N * 10];
        let operands =
            vec![f32s(address(&mut l1), &[n, 6]), f32s(address(&mut l2), &[n, 4]), f32s(address(&mut w), &[n, 8])];
        let mut site = Site::new(minor, payload, 5).with(operands, vec![f32s(address(&mut l3), &[n, 10])]);
        let stream = 0x50_0000 + u64::try_from(round).unwrap();
        for turn in 0..3 {
            site.context.stream = Some(stream);
            site.call(Some(symbol), true).unwrap();
            assert_eq!(world.take(stream).len(), 1, "the frame of a GPU");
            assert!(l3.iter().all(|value| value.is_nan()));

            (site.context.stream, site.context.pool) = (None, Some(pool.clone()));
            site.call(Some(symbol), true).unwrap();
            assert_eq!(world.take(stream).len() + world.take(0).len(), 0, "the frame of a CPU");
            for (i, value) in l3.iter_mut().enumerate() {
                let sum: f32 = l1[i / 10 * 6..i / 10 * 6 + 6].iter().sum();
                assert_eq!(*value, 2.0 * sum + round as f32, "{round} {turn} {i}");
                *value = f32::NAN;
            }
            site.context.pool = None;
        }
        // Neither a stream nor threads: nothing says that the memory is the CPU's.
        let (code, text) = site.call(Some(symbol), true).unwrap_err();
        assert!(code == 9 && text.contains("this target runs on CUDA"), "{code} {text}");
        // What is wrong with a call is said on every platform.
        site.context.pool = Some(pool.clone());
        site.results[0].dimensions[1] += 1;
        let (code, text) = site.call(Some(symbol), true).unwrap_err();
        assert!(code == 3 && text.contains("L3_out") && text.contains("tp_forward, execute"), "{text}");
        site.attributes.remove(0);
        let (code, text) = site.call(Some(symbol), true).unwrap_err();
        assert!(code == 3 && text.contains("`kernel` is missing"), "{text}");
    }
    drop(std::mem::take(&mut *kept.lock().unwrap()));
}

#[test]
fn what_is_asked_of_the_runtime_is_answered_for_both_platforms() {
    let n = 3;
    world();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let hear = Arc::clone(&heard);
    oeq_native::runtime::set_progress(Some(Arc::new(move |event: &oeq_native::compile::Progress<'_>| {
        hear.lock().unwrap().push((event.unit.to_owned(), event.done, event.total));
    })));
    let payload = payload().replacen("__global__", "/* of both */ __global__", 1);
    let (mut l1, mut l2, mut w, mut l3) = (vec![0_f32; 18], vec![0_f32; 12], vec![0_f32; 24], vec![0_f32; 30]);
    let operands =
        vec![f32s(address(&mut l1), &[n, 6]), f32s(address(&mut l2), &[n, 4]), f32s(address(&mut w), &[n, 8])];
    let mut site = Site::new(5, &payload, 5).with(operands, vec![f32s(address(&mut l3), &[n, 10])]);
    site.context.stream = Some(0x60_0000);
    site.run("tp_forward").unwrap();
    // A call site of its own: a state belongs to a platform.
    let mut site = Site::new(5, &payload, 5).with(site.operands.clone(), site.results.clone());
    site.call(host_bundle("tp_forward").execute, true).unwrap();
    oeq_native::runtime::set_progress(None);
    let heard = heard.lock().unwrap();
    for target in ["host", "sm_90"] {
        assert!(heard.iter().any(|(unit, _, _)| *unit == format!("tensor_product/forward for {target}")), "{heard:?}");
    }
    assert!(heard.iter().all(|(_, done, total)| done <= total), "{heard:?}");
    let bundle = Bundle::from_bytes("both", Runtime::global().unwrap().export_compiled()).unwrap();
    let own = Bundle::from_bytes("one", Runtime::host().unwrap().export_compiled()).unwrap();
    let targets = |bundle: &Bundle| -> std::collections::BTreeSet<String> {
        bundle.images().map(|stored| stored.unwrap().target).collect()
    };
    assert_eq!(targets(&own).into_iter().collect::<Vec<_>>(), ["host"]);
    assert_eq!(targets(&bundle).into_iter().collect::<Vec<_>>(), ["host", "sm_80", "sm_90"]);
}

#[test]
fn the_host_is_registered_when_asked_for_with_the_stages_that_it_has() {
    for minor in 1..=5 {
        for spelling in [c"Host", c"host", c"cpu"] {
            let status = unsafe { capi::RegisterFFi(&raw const *FakeXla::of(minor).api, spelling.as_ptr()) };
            assert_eq!(status, 0, "{}", unsafe { CStr::from_ptr(capi::oeq_last_error()) }.to_str().unwrap());
        }
        let handlers = HANDLERS.lock().unwrap();
        let mine: Vec<_> = handlers.iter().filter(|h| h.0 == minor && h.1 == "Host").collect();
        assert_eq!(mine.len(), 8);
        for (_, _, name, bundle, _) in mine {
            let expected = host_bundle(name);
            assert_eq!(bundle.instantiate.map(|f| f as usize), expected.instantiate.map(|f| f as usize));
            assert_eq!(bundle.execute.map(|f| f as usize), expected.execute.map(|f| f as usize));
            assert!(bundle.prepare.is_none() && bundle.initialize.is_none());
        }
    }
    let table = unsafe { &*capi::oeq_ffi_handler_table_on(3, c"Host".as_ptr()).cast::<capi::FfiHandlerTable3>() };
    let cuda = unsafe { &*capi::oeq_ffi_handler_table() };
    assert_eq!((table.abi_version, table.handler_count), (3, cuda.handler_count));
    for index in 0..table.handler_count as usize {
        let (host, cuda) = unsafe { (&*table.handlers.add(index), &*cuda.handlers.add(index)) };
        assert_eq!(unsafe { CStr::from_ptr(host.name) }, unsafe { CStr::from_ptr(cuda.name) });
        assert!(host.initialize.is_null() && host.execute != cuda.execute && host.instantiate != cuda.instantiate);
    }
    assert!(std::ptr::eq(unsafe { capi::oeq_ffi_handler_table_on(3, c"cuda".as_ptr()) }.cast(), cuda));
    assert!(unsafe { capi::oeq_ffi_handler_table_on(3, c"tpu".as_ptr()) }.is_null());
}
