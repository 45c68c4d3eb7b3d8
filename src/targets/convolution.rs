//! `conv_forward`, `conv_backward`, `conv_double_backward`: tensor products on the edges of a graph, summed on its nodes.
//!
//! Shapes: L1 `[nodes, L1_dim]`, L2 `[edges, L2_dim]`, L3 `[nodes, L3_dim]`; weights `[weight_numel]` when shared, else
//! `[edges, weight_numel]`; rows and columns `[edges]`, sorted by row. Newer exports have one more result, the workspace,
//! which replaces the operand of that name as scratch memory; both forms are taken, told apart by the number of results.

use crate::layout::Parameter::{Graph, Operand, Result as Output, Workspace};
use crate::layout::{Call, Element, Extent, Family, Fixup, Launch, Parameter, Shape, Size, TensorSpec};
use crate::payload::{EntryPoint, Requirements};
use crate::registry::{Derivative, Target};

/// The family of all convolution targets.
pub static FAMILY: Family = Family {
    name: "convolution",
    requirements: Requirements { entry_points: ENTRY_POINTS, convolution: true },
    calls: &[FORWARD, BACKWARD, DOUBLE_BACKWARD],
};

const ENTRY_POINTS: &[EntryPoint] = &[
    EntryPoint { name: "forward", deterministic_only: false },
    EntryPoint { name: "backward", deterministic_only: false },
    EntryPoint { name: "double_backward_A", deterministic_only: false },
    EntryPoint { name: "double_backward_B", deterministic_only: false },
    EntryPoint { name: "fixup_forward", deterministic_only: true },
    EntryPoint { name: "fixup_backward", deterministic_only: true },
    EntryPoint { name: "fixup_double_backwardB", deterministic_only: true },
];

const fn l1(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Irreps, shape: Shape::L1(Extent::Nodes) }
}
const fn l2(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Irreps, shape: Shape::L2(Extent::Edges) }
}
const fn l3(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Irreps, shape: Shape::L3(Extent::Nodes) }
}
const fn weights(name: &'static str) -> TensorSpec {
    TensorSpec { name, element: Element::Weights, shape: Shape::Weights(Extent::Edges) }
}
const ROWS: TensorSpec = TensorSpec { name: "rows", element: Element::Index, shape: Shape::Vector(Extent::Edges) };
const COLS: TensorSpec = TensorSpec { name: "cols", element: Element::Index, shape: Shape::Vector(Extent::Edges) };
const WORKSPACE: TensorSpec = TensorSpec { name: "workspace", element: Element::Byte, shape: Shape::Workspace };
const TRANSPOSE_PERM: TensorSpec = TensorSpec {
    name: "transpose_perm",
    element: Element::Index,
    shape: Shape::VectorIfDeterministic(Extent::Edges),
};

const FORWARD: Call = Call {
    operands: &[l1("L1_in"), l2("L2_in"), weights("W"), ROWS, COLS, WORKSPACE, TRANSPOSE_PERM],
    results: &[l3("L3_out")],
    workspace_result: true,
    zeroed: &[0],
    work: Extent::Edges,
    launches: &[Launch {
        entry: "forward",
        size: Size::Forward,
        parameters: &[Operand(0), Operand(1), Operand(2), Output(0), Graph { rows: 3, cols: 4 }, Workspace(5)],
        fixup: Some(Fixup { entry: "fixup_forward", parameters: &[Workspace(5), Output(0)] }),
        cost: 13,
    }],
};

const BACKWARD: Call = Call {
    operands: &[l1("L1_in"), l2("L2_in"), weights("W"), l3("L3_grad"), ROWS, COLS, WORKSPACE, TRANSPOSE_PERM],
    results: &[l1("L1_grad"), l2("L2_grad"), weights("W_grad")],
    workspace_result: true,
    zeroed: &[0, 1, 2],
    work: Extent::Edges,
    launches: &[Launch {
        entry: "backward",
        size: Size::Backward,
        parameters: &[
            Operand(0),
            Output(0),
            Operand(1),
            Output(1),
            Operand(2),
            Output(2),
            Operand(3),
            Graph { rows: 4, cols: 5 },
            Workspace(6),
            Operand(7),
        ],
        fixup: Some(Fixup { entry: "fixup_backward", parameters: &[Workspace(6), Output(0)] }),
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
        ROWS,
        COLS,
        WORKSPACE,
        TRANSPOSE_PERM,
    ],
    results: &[l1("L1_grad"), l2("L2_grad"), weights("W_grad"), l3("L3_dgrad")],
    workspace_result: true,
    zeroed: &[0, 1, 2, 3],
    work: Extent::Edges,
    launches: &[
        Launch {
            entry: "double_backward_A",
            size: Size::Forward,
            parameters: SECOND_ORDER,
            fixup: Some(Fixup { entry: "fixup_forward", parameters: &[Workspace(9), Output(3)] }),
            cost: 13,
        },
        Launch {
            entry: "double_backward_B",
            size: Size::DoubleBackward,
            parameters: SECOND_ORDER,
            fixup: Some(Fixup { entry: "fixup_double_backwardB", parameters: &[Workspace(9), Output(0)] }),
            cost: 20,
        },
    ],
};

const SECOND_ORDER: &[Parameter] = &[
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
    Graph { rows: 7, cols: 8 },
    Workspace(9),
    Operand(10),
];

/// `L3[row] += W (L1[col] x L2[edge])` over the edges.
#[derive(Debug)]
pub struct Forward;

impl Target for Forward {
    const NAME: &'static str = "conv_forward";
    const FAMILY: &'static Family = &FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(0);
}

/// Gradients of [`Forward`] with respect to its operands.
#[derive(Debug)]
pub struct Backward;

impl Target for Backward {
    const NAME: &'static str = "conv_backward";
    const FAMILY: &'static Family = &FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(1);
}

/// Gradients of [`Backward`] with respect to its operands.
#[derive(Debug)]
pub struct DoubleBackward;

impl Target for DoubleBackward {
    const NAME: &'static str = "conv_double_backward";
    const FAMILY: &'static Family = &FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(2);
}

crate::submit_targets!(pub(crate) ANCHOR = [Forward, Backward, DoubleBackward]);
