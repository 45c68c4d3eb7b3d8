//! What one warm call costs before the driver: each stage of each target against a device that does nothing.
#![allow(
    missing_docs,
    clippy::wildcard_imports,
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    unreachable_pub,
    reason = "a benchmark may panic, and its frames live through each closure"
)]

mod cases;
#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::sync::atomic::Ordering;

use common::*;
use criterion::{Criterion, criterion_group, criterion_main};

fn stages(criterion: &mut Criterion) {
    world().silent.store(true, Ordering::Relaxed);
    for (target, mut site) in cases::cases() {
        let bundle = bundle(target);
        let (initialize, execute) = (bundle.initialize.unwrap(), bundle.execute.unwrap());
        site.run(target).unwrap();
        site.frame(true, |frame| {
            let frame: *mut _ = frame;
            criterion.bench_function(&format!("{target}/execute"), |bencher| {
                bencher.iter(|| assert!(unsafe { execute(black_box(frame)) }.is_null()));
            });
            criterion.bench_function(&format!("{target}/initialize"), |bencher| {
                bencher.iter(|| assert!(unsafe { initialize(black_box(frame)) }.is_null()));
            });
        });
    }
}

criterion_group!(benches, stages);
criterion_main!(benches);
