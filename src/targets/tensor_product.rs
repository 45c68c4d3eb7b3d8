//! `tp_forward`, `tp_backward`, `tp_double_backward`: batches of Clebsch-Gordan tensor products.
//!
//! Shapes: L1 `[batch, L1_dim]`, L2 `[batch, L2_dim]`, L3 `[batch, L3_dim]`; weights `[weight_numel]` when shared, else
//! `[batch, weight_numel]`.

use crate::layout::Parameter::{Count, Operand, Result as Output};
use crate::layout::{Call, Element, Extent, Family, Launch, Shape, Size, TensorSpec};
use crate::payload::{EntryPoint, Requirements};
use crate::registry::{Derivative, Target};

/// The family of all tensor product targets.
pub static FAMILY: Family = Family {
    name: "tensor_product",
    requirements: Requirements { entry_points: ENTRY_POINTS, convolution: false },
    calls: &[FORWARD, BACKWARD, DOUBLE_BACKWARD],
};

const ENTRY_POINTS: &[EntryPoint] = &[
    EntryPoint { name: "forward", deterministic_only: false },
    EntryPoint { name: "backward", deterministic_only: false },
    EntryPoint { name: "double_backward_A", deterministic_only: false },
    EntryPoint { name: "double_backward_B", deterministic_only: false },
];

const fn l1(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Irreps, shape: Shape::L1(Extent::Batch) }
}
const fn l2(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Irreps, shape: Shape::L2(Extent::Batch) }
}
const fn l3(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Irreps, shape: Shape::L3(Extent::Batch) }
}
const fn weights(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Weights, shape: Shape::Weights(Extent::Batch) }
}

const FORWARD: Call = Call {
    operands: &[l1("L1_in"), l2("L2_in"), weights("W")],
    results: &[l3("L3_out")],
    workspace_result: false,
    zeroed: &[],
    work: Extent::Batch,
    launches: &[Launch {
        entry: "forward",
        size: Size::Forward,
        parameters: &[Count(Extent::Batch), Operand(0), Operand(1), Output(0), Operand(2)],
        fixup: None,
        cost: 13,
    }],
};

const BACKWARD: Call = Call {
    operands: &[l1("L1_in"), l2("L2_in"), weights("W"), l3("L3_grad")],
    results: &[l1("L1_grad"), l2("L2_grad"), weights("W_grad")],
    workspace_result: false,
    zeroed: &[0, 1, 2],
    work: Extent::Batch,
    launches: &[Launch {
        entry: "backward",
        size: Size::Backward,
        parameters: &[
            Count(Extent::Batch),
            Operand(0),
            Output(0),
            Operand(1),
            Output(1),
            Operand(2),
            Output(2),
            Operand(3),
        ],
        fixup: None,
        cost: 19,
    }],
};

const DOUBLE_BACKWARD: Call = Call {
    operands: &[
        l1("L1_in"),
        l2("L2_in"),
        weights("W"),
        l3("L3_grad"),
        l1("L1_dgrad"),
        l2("L2_dgrad"),
        weights("W_dgrad"),
    ],
    results: &[l1("L1_grad"), l2("L2_grad"), weights("W_grad"), l3("L3_dgrad")],
    workspace_result: false,
    zeroed: &[0, 1, 2, 3],
    work: Extent::Batch,
    launches: &[
        Launch { entry: "double_backward_A", size: Size::Forward, parameters: SECOND_ORDER, fixup: None, cost: 13 },
        Launch {
            entry: "double_backward_B",
            size: Size::DoubleBackward,
            parameters: SECOND_ORDER,
            fixup: None,
            cost: 20,
        },
    ],
};

const SECOND_ORDER: &[crate::layout::Parameter] = &[
    Count(Extent::Batch),
    Operand(0),
    Operand(1),
    Operand(2),
    Operand(3),
    Operand(4),
    Operand(5),
    Operand(6),
    Output(0),
    Output(1),
    Output(2),
    Output(3),
];

/// `L3 = W (L1 x L2)`.
#[derive(Debug)]
pub struct Forward;

impl Target for Forward {
    const NAME: &'static str = "tp_forward";
    const FAMILY: &'static Family = &FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(0);
}

/// Gradients of [`Forward`] with respect to its operands.
#[derive(Debug)]
pub struct Backward;

impl Target for Backward {
    const NAME: &'static str = "tp_backward";
    const FAMILY: &'static Family = &FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(1);
}

/// Gradients of [`Backward`] with respect to its operands.
#[derive(Debug)]
pub struct DoubleBackward;

impl Target for DoubleBackward {
    const NAME: &'static str = "tp_double_backward";
    const FAMILY: &'static Family = &FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(2);
}

crate::submit_targets!(pub(crate) ANCHOR = [Forward, Backward, DoubleBackward]);
