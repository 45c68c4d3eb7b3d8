//! The calls that benchmarks make: one call site of each kind of target, of small shapes.

use crate::common::*;

/// A target and a call site of it.
pub fn cases() -> Vec<(&'static str, Site)> {
    let batch = 64;
    let (l1, l2, l3) = (f32s(1, &[batch, L1]), f32s(2, &[batch, L2]), f32s(4, &[batch, L3]));
    let weights = f32s(3, &[batch, W]);
    let graph = [i32s(5, &[batch]), i32s(6, &[batch]), bytes(7, &[1]), i32s(8, &[1])];
    let backward = vec![l1.clone(), l2.clone(), weights.clone(), l3.clone()];
    let gradients = vec![l1.clone(), l2.clone(), weights.clone()];
    let second = [backward.clone(), gradients.clone()].concat();
    let all = [gradients.clone(), vec![l3.clone()]].concat();
    let with_graph = |operands: &[Tensor]| [operands, &graph[..]].concat();
    let cases = [
        ("tp_forward", false, backward[..3].to_vec(), vec![l3.clone()]),
        ("tp_backward", false, backward.clone(), gradients.clone()),
        ("tp_double_backward", false, second.clone(), all.clone()),
        ("conv_forward", true, with_graph(&backward[..3]), vec![l3]),
        ("conv_backward", true, with_graph(&backward), gradients),
        ("conv_double_backward", true, with_graph(&second), all),
    ];
    cases
        .into_iter()
        .map(|(target, convolution, operands, results)| {
            let payload = PayloadSpec { mark: "bench", convolution, ..PayloadSpec::default() }.json();
            (target, Site::new(4, &payload, 5).with(operands, results))
        })
        .collect()
}
