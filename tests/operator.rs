//! The operators of the Rust API enqueue what XLA's calls do, and name what does not fit.
#![allow(
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_sign_loss,
    clippy::cast_possible_truncation,
    reason = "a failed test should panic; the slices are addresses that the stand-in device never follows"
)]

mod common;

use common::*;
use cust::memory::{DevicePointer, DeviceSlice};
use oeq_native::Runtime;
use oeq_native::operator::{Convolution, Element, Gradients, Graph, Primal, RawStream, TensorProduct};

fn slice<T: Element>(address: u64, dimensions: &[i64]) -> &'static mut DeviceSlice<T> {
    let elements = dimensions.iter().product::<i64>() as usize;
    Box::leak(Box::new(unsafe { DeviceSlice::from_raw_parts_mut(DevicePointer::from_raw(address), elements) }))
}

fn runtime() -> &'static Runtime {
    world();
    Runtime::global().unwrap()
}

#[test]
fn a_tensor_product_enqueues_what_xla_s_calls_do() {
    let world = world();
    let payload = PayloadSpec { mark: "operator tp", ..PayloadSpec::default() }.json();
    let product = TensorProduct::new(runtime(), payload.as_bytes()).unwrap();
    assert_eq!(product.plan().l1_dim, L1 as u64);
    product.prefetch(1, 0).unwrap();
    let (n, stream) = (5, 0x7a00);
    let mut site = Site::new(3, &payload, 1).with(
        vec![f32s(0x1000, &[n, L1]), f32s(0x2000, &[n, L2]), f32s(0x3000, &[n, W]), f32s(0x4000, &[n, L3])],
        vec![f32s(0x9100, &[n, L1]), f32s(0x9200, &[n, L2]), f32s(0x9300, &[n, W])],
    );
    site.context.stream = Some(stream);
    site.run("tp_backward").unwrap();
    let primal = Primal::<f32, f32> {
        l1: slice(0x1000, &[n, L1]),
        l2: slice(0x2000, &[n, L2]),
        weights: slice(0x3000, &[n, W]),
    };
    let gradients = || Gradients::<f32, f32> {
        l1: slice(0x9100, &[n, L1]),
        l2: slice(0x9200, &[n, L2]),
        weights: slice(0x9300, &[n, W]),
    };
    let raw = RawStream(stream as *mut _);
    unsafe { product.backward(0, raw, primal, slice(0x4000, &[n, L3]), gradients()).unwrap() };
    let work = world.take(stream);
    // The hash only picks a bucket, so these are two records; all but the image is the same.
    let mut expected = work[0].clone();
    expected.launches[0].image = work[1].launches[0].image;
    assert_eq!(work[1], expected);

    unsafe {
        product.forward(1, raw, primal.l1, primal.l2, primal.weights, slice(0x9000, &[n, L3])).unwrap();
        let (l3, out) = (slice(0x4000, &[n, L3]), slice(0x9400, &[n, L3]));
        product.double_backward(0, raw, primal, l3, primal, gradients(), out).unwrap();
    }
    let work = world.take(stream);
    assert_eq!((work[0].ordinal, work[0].launches[0].entry.as_str()), (1, "forward"));
    assert_eq!(
        work[1].launches.iter().map(|l| l.entry.as_str()).collect::<Vec<_>>(),
        ["double_backward_A", "double_backward_B"]
    );

    let short = slice::<f32>(0x4000, &[n * L3 - 1]);
    let error = unsafe { product.backward(0, raw, primal, short, gradients()) }.unwrap_err();
    assert!(error.message().contains("`L3_grad` has 49 elements; expected a multiple of 10"), "{error}");
    let fewer = slice::<f32>(0x4000, &[n - 1, L3]);
    let error = unsafe { product.backward(0, raw, primal, fewer, gradients()) }.unwrap_err();
    assert!(error.message().contains("`L3_grad` has shape [4, 10]; expected [5, 10]"), "{error}");
    let doubles = Primal::<f64, f32> { l1: slice(1, &[n, L1]), l2: slice(2, &[n, L2]), weights: primal.weights };
    let error =
        unsafe { product.forward(0, raw, doubles.l1, doubles.l2, doubles.weights, slice(3, &[n, L3])) }.unwrap_err();
    assert!(error.message().contains("`L1_in` has element type f64; expected f32"), "{error}");
    assert!(product.prefetch(3, 0).unwrap_err().message().contains("derivative is 3"));
    assert!(product.prefetch(0, 9).unwrap_err().message().contains("ordinal 9"));
    assert!(world.take(stream).is_empty());
}

#[test]
fn a_convolution_enqueues_what_xla_s_calls_do() {
    let world = world();
    let payload =
        PayloadSpec { mark: "operator conv", convolution: true, deterministic: true, ..PayloadSpec::default() }.json();
    let convolution = Convolution::new(runtime(), payload.as_bytes()).unwrap();
    let (nodes, edges, stream) = (7, 20, 0x7b00);
    let graph = || Graph::<i32> {
        rows: slice(0xa000, &[edges]),
        cols: slice(0xb000, &[edges]),
        workspace: slice(0xc000, &[WORKSPACE]),
        transpose_perm: slice(0xd000, &[edges]),
    };
    let primal = Primal::<f32, f32> {
        l1: slice(0x1000, &[nodes, L1]),
        l2: slice(0x2000, &[edges, L2]),
        weights: slice(0x3000, &[edges, W]),
    };
    let gradients = || Gradients::<f32, f32> {
        l1: slice(0x9100, &[nodes, L1]),
        l2: slice(0x9200, &[edges, L2]),
        weights: slice(0x9300, &[edges, W]),
    };
    let raw = RawStream(stream as *mut _);
    unsafe {
        convolution.forward(0, raw, primal, graph(), slice(0x9000, &[nodes, L3])).unwrap();
        convolution.backward(0, raw, primal, slice(0x4000, &[nodes, L3]), graph(), gradients()).unwrap();
        let (l3, out) = (slice(0x4000, &[nodes, L3]), slice(0x9400, &[nodes, L3]));
        convolution.double_backward(0, raw, primal, l3, primal, graph(), gradients(), out).unwrap();
    }
    let work = world.take(stream);
    let entries: Vec<Vec<_>> = work.iter().map(|w| w.launches.iter().map(|l| l.entry.as_str()).collect()).collect();
    assert_eq!(entries[0], ["forward", "fixup_forward"]);
    assert_eq!(entries[1], ["backward", "fixup_backward"]);
    assert_eq!(entries[2], ["double_backward_A", "fixup_forward", "double_backward_B", "fixup_double_backwardB"]);
    assert_eq!(work[0].launches[0].parameters[4], [0xa000, 0xb000, 20, 7]);
    assert_eq!(work[2].zeros.len(), 4);

    let other = Graph::<i64> {
        rows: slice(0xa000, &[edges]),
        cols: slice(0xb000, &[edges]),
        workspace: slice(0xc000, &[WORKSPACE]),
        transpose_perm: slice(0xd000, &[edges]),
    };
    let error = unsafe { convolution.forward(0, raw, primal, other, slice(0x9000, &[nodes, L3])) }.unwrap_err();
    assert!(error.message().contains("`rows` has element type i64; expected i32"), "{error}");
    assert!(Convolution::new(runtime(), b"{}").is_err());
}
