//! Calls per second of 1 to 16 threads, each with a call site of its own, against a device that does nothing: what threads
//! cost each other in this library alone. Prints a table.
#![allow(
    missing_docs,
    clippy::wildcard_imports,
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    clippy::print_stdout,
    unreachable_pub,
    reason = "a benchmark may panic and prints, and its frames live through each closure"
)]

mod cases;
#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::*;

fn main() {
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    world().silent.store(true, Ordering::Relaxed);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("{cores} cores; conv_backward, initialize and execute");
    println!("{:>7} {:>16} {:>10}", "threads", "calls/s", "speed-up");
    let mut one = None;
    for threads in [1, 2, 4, 8, 16] {
        let (stop, total, gate) = (AtomicBool::new(false), AtomicU64::new(0), Barrier::new(threads + 1));
        let rate = std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let (target, mut site) =
                        cases::cases().into_iter().find(|(target, _)| *target == "conv_backward").unwrap();
                    let bundle = bundle(target);
                    let (initialize, execute) = (bundle.initialize.unwrap(), bundle.execute.unwrap());
                    site.run(target).unwrap();
                    site.frame(true, |frame| {
                        let frame: *mut _ = frame;
                        gate.wait();
                        let mut calls = 0;
                        while !stop.load(Ordering::Relaxed) {
                            for _ in 0..100 {
                                assert!(unsafe { initialize(black_box(frame)) }.is_null());
                                assert!(unsafe { execute(black_box(frame)) }.is_null());
                            }
                            calls += 100;
                        }
                        total.fetch_add(calls, Ordering::Relaxed);
                    });
                });
            }
            gate.wait();
            let begun = Instant::now();
            std::thread::sleep(Duration::from_secs(1));
            stop.store(true, Ordering::Relaxed);
            begun.elapsed()
        });
        #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = total.load(Ordering::Relaxed) as f64 / rate.as_secs_f64();
        let first = *one.get_or_insert(rate);
        println!("{threads:>7} {rate:>16.0} {:>10.2}", rate / first);
    }
}
