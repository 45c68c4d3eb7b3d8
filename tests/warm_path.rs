//! Once warm, execute and initialize allocate nothing and take no lock.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failed test should panic")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use common::*;
use cust::memory::{DevicePointer, DeviceSlice};
use oeq_native::__private::locks_taken;
use oeq_native::Runtime;
use oeq_native::operator::{RawStream, TensorProduct};
use oeq_native::xla::ffi;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as required of our caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count();
        // SAFETY: as required of our caller.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as required of our caller.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations_of(runs: usize, body: impl Fn()) -> usize {
    let before = ALLOCATIONS.with(Cell::get);
    for _ in 0..runs {
        body();
    }
    ALLOCATIONS.with(Cell::get) - before
}

/// One test at a time decides whether the world writes calls down.
static QUIET: Mutex<()> = Mutex::new(());

#[test]
fn warm_calls_allocate_nothing_and_take_no_lock() {
    let _quiet = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
    let world = world();
    for minor in 1..=5 {
        for (order, target) in ["conv_forward", "conv_backward", "conv_double_backward"].into_iter().enumerate() {
            for deterministic in [false, true] {
                let spec = PayloadSpec { mark: "warm", convolution: true, deterministic, ..PayloadSpec::default() };
                let (operands, results) = tensors(order, deterministic);
                let mut site = Site::new(minor, &spec.json(), 5).with(operands, results);
                site.run(target).unwrap();
                world.silent.store(true, Ordering::Relaxed);
                let bundle = bundle(target);
                let (initialize, execute) = (bundle.initialize.unwrap(), bundle.execute.unwrap());
                let (first, warm) = site.frame(true, |frame| {
                    let call = |frame: *mut ffi::CallFrame| {
                        // SAFETY: the frame and what it points to live through the closure.
                        assert!(unsafe { initialize(frame) }.is_null() && unsafe { execute(frame) }.is_null());
                    };
                    let frame: *mut ffi::CallFrame = frame;
                    // A thread's first call may set up its thread-locals.
                    let first = allocations_of(1, || call(frame));
                    let before = locks_taken();
                    let warm = allocations_of(1000, || call(frame));
                    assert_eq!(locks_taken(), before, "{target}, minor {minor}: a warm call took a lock");
                    (first, warm)
                });
                assert!(locks_taken() > 0, "locks are counted");
                assert!(first <= 8, "{target}, minor {minor}: {first} allocations on the first call");
                assert_eq!(warm, 0, "{target}, minor {minor}, deterministic {deterministic}");
                world.silent.store(false, Ordering::Relaxed);
            }
        }
    }
    // The counter counts.
    assert_eq!(allocations_of(10, || drop(std::hint::black_box(vec![1_u8]))), 20);
}

#[test]
fn warm_calls_of_an_operator_allocate_nothing_and_take_no_lock() {
    let _quiet = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
    let world = world();
    let payload = PayloadSpec { mark: "warm operator", ..PayloadSpec::default() }.json();
    let product = TensorProduct::new(Runtime::global().unwrap(), payload.as_bytes()).unwrap();
    let rows = |rows: i64| {
        move |product: &TensorProduct| {
            // SAFETY: the stand-in device never follows the addresses.
            unsafe {
                let of = |address, width: i64| {
                    let elements = usize::try_from(rows * width).unwrap();
                    DeviceSlice::<f32>::from_raw_parts_mut(DevicePointer::from_raw(address), elements)
                };
                let (l1, l2, weights) = (of(0x1000, L1), of(0x2000, L2), of(0x3000, W));
                let stream = RawStream(std::ptr::without_provenance_mut(0x7f00));
                product.forward(0, stream, &l1, &l2, &weights, &mut of(0x4000, L3)).unwrap();
            }
        }
    };
    let (five, six) = (rows(5), rows(6));
    five(&product);
    world.silent.store(true, Ordering::Relaxed);
    five(&product);
    let locks = locks_taken();
    assert_eq!(allocations_of(1000, || five(&product)), 0);
    assert_eq!(locks_taken(), locks, "a warm call took a lock");
    // Other sizes are another call, and the first ones come back as one.
    world.silent.store(false, Ordering::Relaxed);
    world.take(0x7f00);
    for call in [&six, &six, &five] {
        call(&product);
    }
    let counts: Vec<u64> = world.take(0x7f00).iter().map(|work| work.launches[0].parameters[0][0]).collect();
    assert_eq!(counts, [6, 6, 5]);
}

fn tensors(order: usize, deterministic: bool) -> (Vec<Tensor>, Vec<Tensor>) {
    let (nodes, edges) = (7, 20);
    let mut operands = vec![f32s(0x1000, &[nodes, L1]), f32s(0x2000, &[edges, L2]), f32s(0x3000, &[edges, W])];
    let gradients = operands.clone();
    let l3 = f32s(0x4000, &[nodes, L3]);
    let results = match order {
        0 => vec![l3.clone()],
        1 => gradients.clone(),
        _ => [gradients.clone(), vec![l3.clone()]].concat(),
    };
    if order > 0 {
        operands.push(l3);
    }
    if order > 1 {
        operands.extend(gradients);
    }
    let (workspace, perm) = if deterministic { (WORKSPACE, edges) } else { (1, 1) };
    operands.extend([i32s(1, &[edges]), i32s(2, &[edges]), bytes(3, &[workspace]), i32s(4, &[perm])]);
    (operands, results)
}
