//! How long kernels live: while a call site uses them, then in a bounded keep; and that nothing grows.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a failed test should panic, and this one measures"
)]

mod common;

use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::*;
use oeq_native::Runtime;
use oeq_native::config::Config;

/// A kernel of these tests takes some 1,200 bytes, most of it its payload and the source in that, so this keeps a dozen.
const KEEP: u64 = 15_000;

/// One test at a time: they count what is alive in the process.
static ALONE: Mutex<()> = Mutex::new(());

fn world() -> &'static World {
    world_with(Config { compile_threads: 2, store: false, keep_bytes: KEEP, ..Config::default() })
}

fn payload(number: usize) -> String {
    PayloadSpec { mark: &format!("lifetime {number}."), ..PayloadSpec::default() }.json()
}

fn site(payload: &str) -> Site {
    let tensors = (vec![f32s(1, &[5, L1]), f32s(2, &[5, L2]), f32s(3, &[5, W])], vec![f32s(4, &[5, L3])]);
    Site::new(3, payload, 1).with(tensors.0, tensors.1)
}

/// What is pushed out is dropped on another thread; this waits for it to happen.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what} did not happen");
        std::thread::yield_now();
    }
}

#[test]
fn unused_kernels_are_kept_up_to_the_limit_and_used_ones_always() {
    let _alone = ALONE.lock().unwrap();
    let world = world();
    let runtime = Runtime::global().unwrap();
    let mut used = site(&payload(1000));
    used.run("tp_forward").unwrap();
    for number in 0..100 {
        site(&payload(number)).run("tp_forward").unwrap();
    }
    let in_use = || world.loads.load(Ordering::SeqCst) - world.unloads.load(Ordering::SeqCst);
    eventually("dropping the oldest", || runtime.kernels() <= 14);
    assert!(runtime.kernels() >= 5, "{} kernels are left", runtime.kernels());
    eventually("unloading their modules", || in_use() <= 14);
    // The one in use is older than all of them and still there.
    let loads = world.loads.load(Ordering::SeqCst);
    used.execute("tp_forward").unwrap();
    assert_eq!(world.loads.load(Ordering::SeqCst), loads);

    // The newest is kept: making it again compiles and loads nothing. The oldest is gone and comes back.
    let compiled = |number: usize| world.compilations(&format!("lifetime {number}."), ARCHITECTURES[0]);
    site(&payload(99)).run("tp_forward").unwrap();
    assert_eq!((compiled(99), world.loads.load(Ordering::SeqCst)), (1, loads));
    site(&payload(0)).run("tp_forward").unwrap();
    assert_eq!((compiled(0), world.loads.load(Ordering::SeqCst)), (2, loads + 1));
    // While a kernel is used it does not count as kept, and letting it go pushes nothing out twice.
    drop(used);
    eventually("keeping no more than the limit", || runtime.kernels() <= 14);
}

#[test]
fn kernels_that_were_never_compiled_or_compile_too_late_count_as_well() {
    let _alone = ALONE.lock().unwrap();
    let world = world();
    let runtime = Runtime::global().unwrap();
    let modules = || world.loads.load(Ordering::SeqCst) - world.unloads.load(Ordering::SeqCst);
    let instantiate = |payload: &str| site(payload).instantiate("tp_forward", true).unwrap();
    // Instantiated and gone, most before the compiler has come to them.
    for number in 0..200 {
        instantiate(&payload(4000 + number));
    }
    eventually("dropping what nobody waited for", || runtime.kernels() <= 14);
    // And those whose compilation fails.
    world.failing.lock().unwrap().push("hopeless".to_owned());
    for number in 0..100 {
        let payload = PayloadSpec { mark: &format!("hopeless {number}"), ..PayloadSpec::default() }.json();
        assert!(site(&payload).run("tp_forward").is_err());
    }
    world.failing.lock().unwrap().clear();
    eventually("dropping what failed", || runtime.kernels() <= 14);
    eventually("unloading their modules", || modules() <= 14);
}

#[test]
fn what_a_command_buffer_holds_of_calls_without_state_stays_loaded() {
    let _alone = ALONE.lock().unwrap();
    let world = world();
    let modules = || world.loads.load(Ordering::SeqCst) - world.unloads.load(Ordering::SeqCst);
    let run = |number: usize| {
        // On a thread that ends: what it kept of its calls goes with it.
        std::thread::spawn(move || {
            let handler = oeq_native::registry::table().unwrap().find("tp_forward").unwrap().stateless;
            site(&payload(number)).frame(true, |frame| {
                frame.stage = oeq_native::xla::ffi::stage::EXECUTE;
                // SAFETY: the frame and what it points to live through the closure.
                answer(unsafe { handler(frame) }).unwrap();
            });
        })
        .join()
        .unwrap();
    };
    let push_out = |from: usize| (from..from + 30).for_each(|number| site(&payload(number)).run("tp_forward").unwrap());
    // Not captured: its module goes when others have pushed it out.
    let loads = || world.loads.load(Ordering::SeqCst);
    run(5000);
    push_out(5100);
    eventually("unloading", || modules() <= 14);
    let before = loads();
    run(5000);
    assert_eq!(loads(), before + 1, "it was gone");
    // Captured: it stays.
    world.capturing.store(true, Ordering::SeqCst);
    run(5001);
    world.capturing.store(false, Ordering::SeqCst);
    push_out(5200);
    eventually("unloading", || modules() <= 15);
    let before = loads();
    run(5001);
    assert_eq!(loads(), before, "it was unloaded under a command buffer");
}

#[test]
fn threads_that_use_and_drop_the_same_kernels_disturb_nobody() {
    let _alone = ALONE.lock().unwrap();
    world().silent.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                for round in 0..300 {
                    site(&payload(2000 + (thread * 7 + round) % 30)).run("tp_forward").unwrap();
                }
            });
        }
    });
    eventually("dropping the oldest", || Runtime::global().unwrap().kernels() <= 14);
    world().silent.store(false, Ordering::SeqCst);
}

fn resident_kilobytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn cycles_of_instantiate_and_destroy_leave_memory_handles_and_threads_flat() {
    let _alone = ALONE.lock().unwrap();
    let world = world();
    world.silent.store(true, Ordering::SeqCst);
    let cycles: usize = std::env::var("OEQ_TEST_CYCLES").map_or(10_000, |cycles| cycles.parse().unwrap());
    let payloads: Vec<String> = (3000..3100).map(payload).collect();
    let round = |count: usize| {
        for cycle in 0..count {
            site(&payloads[cycle % 100]).run("tp_forward").unwrap();
            // The stand-in keeps a note of every compilation; that is its own memory, not ours.
            world.compiled.lock().unwrap().clear();
        }
    };
    round(cycles / 10);
    let state = || (count("/proc/self/fd"), count("/proc/self/task"));
    let (before, memory) = (state(), resident_kilobytes());
    round(cycles);
    let grown = resident_kilobytes().saturating_sub(memory);
    assert!(grown < 4096, "{grown} KB more after {cycles} cycles");
    assert_eq!(state().0, before.0, "open files");
    assert!(state().1 <= before.1 + 2, "threads");
    println!(
        "{cycles} cycles over 100 payloads: {grown} KB more than the {memory} KB before, {:?} files and threads",
        state()
    );
    world.silent.store(false, Ordering::SeqCst);
}
