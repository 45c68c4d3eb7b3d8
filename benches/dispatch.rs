//! What one warm call costs before the driver: each stage of each kind of target against a device that does nothing.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    reason = "a benchmark may panic, and its frames live through each closure"
)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::sync::atomic::Ordering;

use common::*;
use criterion::{Criterion, criterion_group, criterion_main};

fn stages(criterion: &mut Criterion) {
    let world = world();
    world.silent.store(true, Ordering::Relaxed);
    let batch = 64;
    let (l1, l2, l3) = (f32s(1, &[batch, L1]), f32s(2, &[batch, L2]), f32s(4, &[batch, L3]));
    let weights = f32s(3, &[batch, W]);
    let graph = [i32s(5, &[batch]), i32s(6, &[batch]), bytes(7, &[1]), i32s(8, &[1])];
    let backward = vec![l1.clone(), l2.clone(), weights.clone(), l3.clone()];
    let gradients = vec![l1.clone(), l2.clone(), weights.clone()];
    let cases = [
        ("tp_forward", false, backward[..3].to_vec(), vec![l3]),
        ("tp_backward", false, backward.clone(), gradients.clone()),
        ("conv_backward", true, [backward, graph.to_vec()].concat(), gradients),
    ];
    for (target, convolution, operands, results) in cases {
        let payload = PayloadSpec { mark: "bench", convolution, ..PayloadSpec::default() }.json();
        let bundle = bundle(target);
        let (initialize, execute) = (bundle.initialize.unwrap(), bundle.execute.unwrap());
        let mut site = Site::new(4, &payload, 5).with(operands, results);
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
