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

use common::*;
use oeq_native::compile::host::HostCompiler;
use oeq_native::compile::{Architecture, Compiler, Image, Program};
use oeq_native::driver::host::Host;
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
";
const ENTRIES: [&str; 4] = ["where", "sums", "count", "some_leave_early"];

fn compile(source: &str, entry_points: &[&str]) -> Result<Image, Error> {
    HostCompiler::new(None).compile(&Program {
        name: "test.cu",
        source,
        architecture: Architecture::HOST,
        entry_points,
        extra_options: &[],
    })
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
    fn run(&self, entry: &'static str, (blocks, threads): (u32, u32), zeros: &[Zero], parameters: &[&[u64]]) {
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
        unsafe { self.host.enqueue(0, Stream(std::ptr::null_mut()), &work).unwrap() };
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
        for _ in 0..2 {
            l3.fill(f32::NAN);
            site.call(host_bundle("tp_forward").execute, true).unwrap();
            for (i, value) in l3.iter().enumerate() {
                let (row, column) = (i / 10, i % 10);
                let sum: f32 = l1[row * 6..row * 6 + 6].iter().sum();
                assert_eq!(*value, sum * w[row * 8 + column % 8] + l2[row * 4 + column % 4], "{row} {column}");
            }
        }

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
