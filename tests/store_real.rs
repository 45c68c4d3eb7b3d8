//! The store with a real NVRTC and real processes: who opens it, who compiles, what a newer device gets.
//!
//! `OEQ_TEST_NVRTC` names the library or its directory; `tests/run.sh` sets it. Each process is this program again, for one
//! test, with `OEQ_TEST_CHILD` telling that test that it is the child.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test that cannot go on should stop, and times are for people"
)]

use std::borrow::Cow;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use oeq_native::compile::bundle::Builder;
use oeq_native::compile::images::{Request, label};
use oeq_native::compile::key::digest;
use oeq_native::compile::store::{Store, Wanted};
use oeq_native::compile::{Artifact, ImageKind, Images, Key, NvrtcCompiler, Pool, Target};
use oeq_native::config::Config;
use oeq_native::stats::{Counters, Stats};

const UNITS: usize = 6;

fn nvrtc() -> PathBuf {
    let path = env::var_os("OEQ_TEST_NVRTC").unwrap_or_else(|| panic!("set OEQ_TEST_NVRTC; tests/run.sh does"));
    PathBuf::from(path)
}

/// A program of which no two numbers give the same code, big enough to take a while.
fn source(number: usize) -> String {
    use std::fmt::Write as _;
    let mut source = String::from("__global__ void forward(float *x) {\n");
    for line in 0..120 {
        writeln!(source, "x[{line}] += x[{}] * {number}.5f - x[{}];", line * 7 % 120, line * 13 % 120).unwrap();
    }
    source + "}\n"
}

fn key(number: usize, target: Target) -> Key {
    Key::new("tensor_product", &digest(source(number).as_bytes()), &["forward"], target)
}

struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("real-{name}-{}-{number}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// What a process does: everything on a pool of two, as the runtime does it. What it has then goes into a bundle, if one is
/// wanted.
fn compile_all(config: &Config, target: Target, bundle: Option<&Path>) -> Stats {
    let counters = Arc::<Counters>::default();
    let compiler = Arc::new(NvrtcCompiler::new(config.nvrtc.clone()));
    let images = Arc::new(Images::new(config, compiler, Arc::clone(&counters)));
    let pool = Arc::new(Pool::new(2));
    let all = Arc::new(Mutex::new(Vec::new()));
    let queued = Instant::now();
    let artifacts: Vec<Arc<Artifact>> = (0..UNITS)
        .map(|number| {
            let (images, all) = (Arc::clone(&images), Arc::clone(&all));
            let work = move |may_defer| {
                let request = Request {
                    key: key(number, target),
                    family: "tensor_product",
                    target,
                    entry_points: &["forward"],
                    text: &|| Cow::Owned(source(number)),
                    label: &label("tensor_product", &["forward"], target),
                    queued,
                };
                let outcome = images.obtain(&request, may_defer)?;
                all.lock().unwrap().extend(outcome.iter().cloned());
                Some(outcome.map(|stored| stored.image))
            };
            Artifact::start_in_turns(&pool, 1, work, || ())
        })
        .collect();
    for artifact in artifacts {
        artifact.wait(&pool).unwrap();
    }
    if let Some(path) = bundle {
        let mut builder = Builder::default();
        all.lock().unwrap().drain(..).for_each(|stored| assert!(builder.add(stored)));
        builder.write(path).unwrap();
    }
    counters.snapshot()
}

/// What a child prints: compiled, hits, waits, milliseconds.
#[derive(Debug, Clone, Copy)]
struct Told {
    compiled: u64,
    hits: u64,
    milliseconds: u64,
}

fn as_child(role: &str) {
    let tree = PathBuf::from(env::var_os("OEQ_TEST_TREE").unwrap());
    let nvrtc = if role == "missing" { "/nonesuch/libnvrtc.so.13".into() } else { nvrtc() };
    let target: Target = env::var("OEQ_TEST_TARGET").unwrap().parse().unwrap();
    let begin = Instant::now();
    let (kernels, bundled) = (tree.join("kernels.oeqb"), role == "bundle");
    let config = Config {
        store: !bundled,
        store_dir: Some(tree.join("store")),
        nvrtc: Some(nvrtc),
        bundle: bundled.then(|| kernels.to_str().unwrap().to_owned()),
        ..Config::default()
    };
    let stats = compile_all(&config, target, (role == "export").then_some(&kernels));
    let milliseconds = begin.elapsed().as_millis();
    println!("told {} {} {milliseconds}", stats.compiled, stats.store_hits + stats.bundle_hits);
    let loaded = fs::read_to_string("/proc/self/maps").unwrap().contains("libnvrtc");
    if role == "any" {
        // It may have opened NVRTC to ask for its version and then found that others had compiled everything.
        assert!(loaded || stats.compiled == 0, "{} units were compiled without NVRTC", stats.compiled);
    } else {
        assert_eq!(loaded, stats.compiled > 0, "whether NVRTC is in /proc/self/maps");
    }
}

fn spawn(test: &str, role: &str, target: &str, tree: &Tree) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("OEQ_TEST_CHILD", role).env("OEQ_TEST_TREE", &tree.0).env("OEQ_TEST_TARGET", target);
    command.spawn().unwrap()
}

fn finish(child: Child) -> Told {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}", output.status);
    let line = text.lines().find_map(|line| line.split_once("told ")).unwrap().1;
    let numbers: Vec<u64> = line.split(' ').map(|number| number.parse().unwrap()).collect();
    Told { compiled: numbers[0], hits: numbers[1], milliseconds: numbers[2] }
}

#[test]
fn a_warm_process_never_opens_nvrtc_and_does_not_miss_it() {
    const TEST: &str = "a_warm_process_never_opens_nvrtc_and_does_not_miss_it";
    if let Ok(role) = env::var("OEQ_TEST_CHILD") {
        return as_child(&role);
    }
    let tree = Tree::new("warm");
    let run = |role| finish(spawn(TEST, role, "sm_90", &tree));
    let (cold, warm, missing) = (run("cold"), run("warm"), run("missing"));
    assert_eq!([cold.compiled, warm.compiled, missing.compiled], [UNITS as u64, 0, 0]);
    assert_eq!([cold.hits, warm.hits, missing.hits], [0, UNITS as u64, UNITS as u64]);
    println!(
        "{UNITS} units: cold {} ms, warm {} ms, warm with no NVRTC to be found {} ms",
        cold.milliseconds, warm.milliseconds, missing.milliseconds
    );
}

#[test]
fn a_process_with_a_bundle_never_opens_nvrtc() {
    const TEST: &str = "a_process_with_a_bundle_never_opens_nvrtc";
    if let Ok(role) = env::var("OEQ_TEST_CHILD") {
        return as_child(&role);
    }
    let tree = Tree::new("bundle");
    assert_eq!(finish(spawn(TEST, "export", "sm_90", &tree)).compiled, UNITS as u64);
    // NVRTC is there to be found, and there is no store: without the bundle everything would be compiled.
    let bundled = finish(spawn(TEST, "bundle", "sm_90", &tree));
    assert_eq!((bundled.compiled, bundled.hits), (0, UNITS as u64));
    println!("{UNITS} units from a bundle: {} ms", bundled.milliseconds);
}

#[test]
fn eight_cold_processes_compile_what_one_would() {
    const TEST: &str = "eight_cold_processes_compile_what_one_would";
    if let Ok(role) = env::var("OEQ_TEST_CHILD") {
        return as_child(&role);
    }
    let one = finish(spawn(TEST, "cold", "sm_90", &Tree::new("one")));
    let tree = Tree::new("eight");
    let children: Vec<Child> = (0..8).map(|_| spawn(TEST, "any", "sm_90", &tree)).collect();
    // Whether NVRTC is loaded depends on who wins; the sum is what counts.
    let mut told = Vec::new();
    for child in children {
        told.push(finish(child));
    }
    let compiled: u64 = told.iter().map(|told| told.compiled).sum();
    let slowest = told.iter().map(|told| told.milliseconds).max().unwrap();
    println!("8 processes: {compiled} compilations, the slowest {slowest} ms; one process {} ms", one.milliseconds);
    assert_eq!((compiled, one.compiled), (UNITS as u64, UNITS as u64));
    assert_eq!(told.iter().map(|told| told.compiled + told.hits).sum::<u64>(), 8 * UNITS as u64);
}

#[test]
fn ptx_for_a_newer_device_is_kept_apart_from_machine_code() {
    const TEST: &str = "ptx_for_a_newer_device_is_kept_apart_from_machine_code";
    if let Ok(role) = env::var("OEQ_TEST_CHILD") {
        return as_child(&role);
    }
    let tree = Tree::new("newer");
    assert_eq!(finish(spawn(TEST, "cold", "sm_90", &tree)).compiled, UNITS as u64);
    assert_eq!(finish(spawn(TEST, "cold", "sm_990", &tree)).compiled, UNITS as u64);
    assert_eq!(finish(spawn(TEST, "warm", "sm_990", &tree)).compiled, 0);
    let store = Store::new(&tree.0.join("store"), 1 << 30, Arc::default());
    for (target, kind) in [("sm_90", ImageKind::Cubin), ("sm_990", ImageKind::Ptx)] {
        let found = store.find(&key(0, target.parse().unwrap()), Wanted::Any).unwrap();
        assert_eq!((found.image.kind(), found.target.as_str()), (kind, target));
    }
    let shards = fs::read_dir(store.root().join("images")).unwrap();
    let names: Vec<String> = shards
        .flat_map(|shard| fs::read_dir(shard.unwrap().path()).unwrap())
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect();
    let count = |suffix: &str| names.iter().filter(|name| name.ends_with(suffix)).count();
    assert_eq!((count(".cubin"), count(".ptx")), (UNITS, UNITS));
}

#[test]
fn a_process_killed_while_nvrtc_compiles_costs_the_others_nothing() {
    const TEST: &str = "a_process_killed_while_nvrtc_compiles_costs_the_others_nothing";
    if let Ok(role) = env::var("OEQ_TEST_CHILD") {
        return as_child(&role);
    }
    let mut killed = 0;
    for round in 0..20_u64 {
        let tree = Tree::new("killed");
        let mut victim = spawn(TEST, "any", "sm_90", &tree);
        // Into the middle of its compilations, at another point each time.
        while fs::read_dir(tree.0.join("store/v1/locks")).is_ok_and(|locks| locks.count() > 0).eq(&false) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(round * 29 % 400));
        killed += u64::from(victim.try_wait().unwrap().is_none());
        victim.kill().unwrap();
        victim.wait().unwrap();
        let next = finish(spawn(TEST, "any", "sm_90", &tree));
        assert_eq!(next.compiled + next.hits, UNITS as u64, "round {round}: {next:?}");
        let last = finish(spawn(TEST, "warm", "sm_90", &tree));
        assert_eq!((last.compiled, last.hits), (0, UNITS as u64), "round {round}");
    }
    println!("{killed} of 20 were killed at work; every later process had every unit");
    assert!(killed >= 10);
}
