//! What compiling a model's kernels takes under several policies, on this machine, without a GPU: a table, with the
//! theoretical floor beside each row. `OEQ_BENCH_PAYLOADS` names a folder with payloads (`tests/gpu/problems.py` makes them
//! from `OpenEquivariance`), `OEQ_NVRTC` the compiler, `OEQ_BENCH_REPEAT` how often each policy runs (the best counts).
//!
//! The floor is the sum of the units' times, each compiled with nothing beside it, over the cores, or the longest unit
//! where that is more. It is not quite reachable where cores share caches, memory or hyper-threads.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a benchmark may panic, and prints its table"
)]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use oeq_native::compile::nvrtc::{Nvrtc, Program};
use oeq_native::compile::pool::{Pool, default_workers};
use oeq_native::compile::unit::Cut;
use oeq_native::config::CompileUnits;
use oeq_native::layout::Family;
use oeq_native::payload::KernelPlan;
use oeq_native::registry;

/// Something to compile.
#[derive(Clone)]
struct Unit {
    name: String,
    source: Arc<str>,
    entry_points: Vec<&'static str>,
    weight: u64,
}

/// Which part of a model.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Energy,
    Forces,
    All,
}

impl Part {
    fn orders(self) -> usize {
        match self {
            Self::Energy => 1,
            Self::Forces => 2,
            Self::All => 3,
        }
    }
}

struct Kernel {
    name: String,
    family: &'static Family,
    plan: KernelPlan,
}

fn kernels() -> Vec<Kernel> {
    let Some(folder) = std::env::var_os("OEQ_BENCH_PAYLOADS").map(PathBuf::from) else { return Vec::new() };
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let family = |target| registry::table().unwrap().find(target).unwrap().family;
    let read = |file: &PathBuf| {
        let text = std::fs::read(file).unwrap();
        let of =
            |family: &'static Family| KernelPlan::from_json(&text, &family.requirements).map(|plan| (family, plan));
        let (family, plan) = of(family("conv_forward")).or_else(|_| of(family("tp_forward"))).unwrap();
        Kernel { name: file.file_stem().unwrap().to_str().unwrap().to_owned(), family, plan }
    };
    files.iter().map(read).collect()
}

fn units(kernels: &[Kernel], part: Part, policy: CompileUnits) -> Vec<Unit> {
    let mut units = Vec::new();
    for Kernel { name, family, plan } in kernels {
        let cut = Cut::of(family, plan, policy);
        let mut wanted: Vec<usize> = family.calls[..part.orders()]
            .iter()
            .flat_map(|call| call.launches)
            .map(|launch| cut.unit_of(launch, plan))
            .collect();
        wanted.sort_unstable();
        wanted.dedup();
        units.extend(wanted.into_iter().map(|index| {
            let unit = &cut.units[index];
            let entry_points: Vec<&'static str> = unit.entries.iter().map(|entry| entry.name).collect();
            Unit {
                name: format!("{name}/{}", entry_points.join("+")),
                source: cut.text(unit, plan).into(),
                entry_points,
                weight: plan.source.len() as u64 * u64::from(unit.cost),
            }
        }));
    }
    units
}

fn compile(nvrtc: &Nvrtc, unit: &Unit, options: &[String]) {
    let program = Program {
        name: &unit.name,
        source: &unit.source,
        architecture: "sm_90".parse().unwrap(),
        entry_points: &unit.entry_points,
        extra_options: options,
    };
    nvrtc.compile(&program).unwrap();
}

/// How units are ordered and compiled.
#[derive(Clone, Copy)]
struct Policy {
    workers: usize,
    largest_first: bool,
    /// `--split-compile=0` for the last so many units, those that begin when a worker is about to idle.
    split_last: usize,
}

/// Seconds from the first submission to the last result.
fn run(nvrtc: &Arc<Nvrtc>, units: &[Unit], policy: Policy) -> f64 {
    let pool = Pool::new(policy.workers);
    let started = Arc::new(AtomicUsize::new(0));
    let begin = Instant::now();
    let (send, done) = std::sync::mpsc::channel();
    let count = units.len();
    for unit in units {
        let (nvrtc, unit, send, started) = (Arc::clone(nvrtc), unit.clone(), send.clone(), Arc::clone(&started));
        let weight = if policy.largest_first { unit.weight } else { 0 };
        let job = Box::new(move || {
            let last = started.fetch_add(1, Ordering::Relaxed) + policy.split_last >= count;
            compile(&nvrtc, &unit, if last { &*SPLIT } else { &[] });
            send.send(()).unwrap();
        });
        assert!(pool.submit(weight, job).is_ok());
    }
    drop(send);
    assert_eq!(done.iter().count(), count);
    begin.elapsed().as_secs_f64()
}

static SPLIT: std::sync::LazyLock<[String; 1]> = std::sync::LazyLock::new(|| ["--split-compile=0".to_owned()]);

fn main() {
    let kernels = kernels();
    if kernels.is_empty() {
        println!("cold: OEQ_BENCH_PAYLOADS names no folder with payloads; see the head of benches/cold.rs");
        return;
    }
    let nvrtc = Arc::new(Nvrtc::find(std::env::var_os("OEQ_NVRTC").map(PathBuf::from).as_deref()).unwrap());
    let repeat: usize = std::env::var("OEQ_BENCH_REPEAT").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let cores = default_workers();
    let (major, minor) = nvrtc.version();
    println!("{} payloads, {cores} cores, NVRTC {major}.{minor}, best of {repeat}; seconds", kernels.len());

    let parts = [("energy", Part::Energy), ("energy and forces", Part::Forces), ("everything", Part::All)];
    let [whole, pooled] = [1, 8].map(|workers| {
        let policy = Policy { workers, largest_first: false, split_last: usize::MAX >> 1 };
        let units = units(&kernels, Part::All, CompileUnits::Whole);
        (0..repeat).map(|_| run(&nvrtc, &units, policy)).fold(f64::INFINITY, f64::min)
    });
    println!("{:<58} {whole:>8.2}", "whole programs, one by one, --split-compile=0");
    println!("{:<58} {pooled:>8.2}", "whole programs, pool of 8, --split-compile=0");
    println!(
        "{:<58} {:>8} {:>8} {:>8} {:>10} {:>10}",
        "units", "seconds", "floor", "of floor", "one by one", "pool of 8"
    );
    for (name, part) in parts {
        let units = units(&kernels, part, CompileUnits::Split);
        let mut alone = vec![f64::INFINITY; units.len()];
        let last = units.len().min(cores);
        let pool = |largest_first, split_last| Policy { workers: cores, largest_first, split_last };
        let policies = [
            ("in the payloads' order", pool(false, 0)),
            ("largest first", pool(true, 0)),
            ("largest first, the last ones with --split-compile=0", pool(true, last)),
            ("largest first, all with --split-compile=0", pool(true, usize::MAX >> 1)),
        ];
        let mut best = [f64::INFINITY; 4];
        // In turns, so that whatever else the machine does meets all of them.
        for _ in 0..repeat {
            for (time, unit) in alone.iter_mut().zip(&units) {
                let begin = Instant::now();
                compile(&nvrtc, unit, &[]);
                *time = time.min(begin.elapsed().as_secs_f64());
            }
            for (time, (_, policy)) in best.iter_mut().zip(&policies) {
                *time = time.min(run(&nvrtc, &units, *policy));
            }
        }
        let sum: f64 = alone.iter().sum();
        let floor = alone.iter().copied().fold(sum / f64::from(u32::try_from(cores).unwrap()), f64::max);
        println!("{name}: {} units, {sum:.2} s one at a time", units.len());
        for (time, (policy, _)) in best.iter().zip(&policies) {
            println!(
                "  {policy:<56} {time:>8.2} {floor:>8.2} {:>8.2} {:>9.1}x {:>9.1}x",
                time / floor,
                whole / time,
                pooled / time
            );
        }
    }
}
