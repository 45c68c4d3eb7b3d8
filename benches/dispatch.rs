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

/// Calls without state: what the comparison of the payload adds, for the sizes that OEQ makes.
fn stateless(criterion: &mut Criterion) {
    let world = world();
    world.silent.store(true, Ordering::Relaxed);
    let handler = oeq_native::registry::table().unwrap().find("tp_forward").unwrap().stateless;
    let batch = 64;
    for size in [4 << 10, 64 << 10, 229 << 10, 1 << 20] {
        let mark = "x".repeat(size);
        let payload = PayloadSpec { mark: &mark, ..PayloadSpec::default() }.json();
        let operands = vec![f32s(1, &[batch, L1]), f32s(2, &[batch, L2]), f32s(3, &[batch, W])];
        let mut site = Site::new(4, &payload, 5).with(operands, vec![f32s(4, &[batch, L3])]);
        site.frame(true, |frame| {
            let frame: *mut _ = frame;
            assert!(unsafe { handler(frame) }.is_null());
            criterion.bench_function(&format!("stateless/{} KiB", size >> 10), |bencher| {
                bencher.iter(|| assert!(unsafe { handler(black_box(frame)) }.is_null()));
            });
        });
    }
}

criterion_group!(benches, stages, stateless);
criterion_main!(benches);
