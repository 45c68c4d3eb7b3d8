//! The vocabulary in which a kernel family says what its calls look like: operands, results, what is zeroed, what is
//! launched with which parameters. A family is data; this module checks a call's tensors against it.
//!
//! Shapes speak of three extents, [`Extent::Batch`], [`Extent::Edges`] and [`Extent::Nodes`], which a call's own tensors
//! define, and of the payload's constants. A tensor that disagrees with the one that defined an extent is an error that
//! names the tensor, what was expected and what came.

use std::fmt;

use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::payload::{Dtype, KernelPlan, LaunchSize, Requirements};

/// A kernel family: the targets of one family read the same payloads.
#[derive(Debug)]
pub struct Family {
    /// The family's name; part of a kernel's identity.
    pub name: &'static str,
    /// What the family demands of a payload.
    pub requirements: Requirements,
    /// One call per derivative order: forward, backward, double backward.
    pub calls: &'static [Call],
}

/// What a call of one derivative order takes, gives and does.
#[derive(Debug)]
pub struct Call {
    /// Operands, in order.
    pub operands: &'static [TensorSpec],
    /// Results, in order.
    pub results: &'static [TensorSpec],
    /// Whether one more result may follow: a workspace that replaces the operand of that name as scratch.
    pub workspace_result: bool,
    /// Indices of the results that are filled with zeros before the first launch.
    pub zeroed: &'static [usize],
    /// The extent that counts the work: where it is 0, nothing is launched.
    pub work: Extent,
    /// The launches, in order.
    pub launches: &'static [Launch],
}

/// One kernel launch, and the fix-up that follows it when the payload is deterministic.
#[derive(Debug)]
pub struct Launch {
    /// Entry point.
    pub entry: &'static str,
    /// Which of the payload's launch sizes applies.
    pub size: Size,
    /// Kernel parameters, in order.
    pub parameters: &'static [Parameter],
    /// Entry point of the fix-up, launched with the same grid and block and no dynamic shared memory.
    pub fixup: Option<Fixup>,
    /// Compile time relative to the family's other launches: the most expensive ones are compiled first.
    pub cost: u32,
}

/// A fix-up: adds the partial sums of the workspace to a result.
#[derive(Debug)]
pub struct Fixup {
    /// Entry point.
    pub entry: &'static str,
    /// Kernel parameters, in order.
    pub parameters: &'static [Parameter],
}

/// Which of a payload's launch sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    /// `forward_config`.
    Forward,
    /// `backward_config`.
    Backward,
    /// `double_backward_config`.
    DoubleBackward,
}

impl Size {
    /// The payload's launch size.
    #[must_use]
    pub fn of(self, plan: &KernelPlan) -> LaunchSize {
        match self {
            Self::Forward => plan.forward,
            Self::Backward => plan.backward,
            Self::DoubleBackward => plan.double_backward,
        }
    }
}

/// Where a kernel parameter comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parameter {
    /// An extent, as u64.
    Count(Extent),
    /// Address of the operand of this index.
    Operand(usize),
    /// Address of the result of this index.
    Result(usize),
    /// The graph by value: addresses of two operands (rows and columns), then edges and nodes as u64.
    Graph {
        /// Index of the operand that holds each edge's row.
        rows: usize,
        /// Index of the operand that holds each edge's column.
        cols: usize,
    },
    /// Address of the scratch memory, null when the payload is not deterministic: the extra result where the call has
    /// one, else the operand of this index.
    Workspace(usize),
}

/// A length that the tensors of a call share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Rows of a batch of tensor products.
    Batch,
    /// Edges of a graph.
    Edges,
    /// Nodes of a graph.
    Nodes,
}

impl Extent {
    const ALL: [Self; 3] = [Self::Batch, Self::Edges, Self::Nodes];

    fn noun(self) -> &'static str {
        match self {
            Self::Batch => "batch size",
            Self::Edges => "number of edges",
            Self::Nodes => "number of nodes",
        }
    }
}

/// One operand or result.
#[derive(Debug)]
pub struct TensorSpec {
    /// Its name in OEQ, used in error texts.
    pub name: &'static str,
    /// Its element type.
    pub element: Element,
    /// Its shape.
    pub shape: Shape,
}

impl TensorSpec {
    /// The dimensions of a flat slice of this many elements, read as this tensor.
    ///
    /// # Errors
    /// The slice is not a whole number of rows.
    pub fn dimensions_of(&self, plan: &KernelPlan, elements: usize) -> Result<SmallVec<[i64; 2]>> {
        let whole = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let width = match self.shape {
            Shape::L1(_) => plan.l1_dim,
            Shape::L2(_) => plan.l2_dim,
            Shape::L3(_) => plan.l3_dim,
            Shape::Weights(_) if !plan.shared_weights => plan.weight_numel,
            Shape::Weights(_) | Shape::Vector(_) | Shape::VectorIfDeterministic(_) | Shape::Workspace => {
                return Ok(SmallVec::from_slice(&[whole(elements as u64)]));
            }
        };
        let elements = elements as u64;
        if elements % width != 0 {
            return Err(Error::invalid(format!(
                "tensor `{}` has {elements} elements; expected a multiple of {width}, the length of its rows",
                self.name
            )));
        }
        Ok(SmallVec::from_slice(&[whole(elements / width), whole(width)]))
    }
}

/// Element types, as the payload decides them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// The payload's `irrep_dtype`.
    Irreps,
    /// The payload's `weight_dtype`.
    Weights,
    /// The payload's `idx_dtype`.
    Index,
    /// Bytes.
    Byte,
}

impl Element {
    fn dtype(self, plan: &KernelPlan) -> Option<Dtype> {
        match self {
            Self::Irreps => Some(plan.irrep_dtype),
            Self::Weights => Some(plan.weight_dtype),
            Self::Index => plan.index_dtype,
            Self::Byte => Some(Dtype::U8),
        }
    }
}

/// Shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `[extent, L1_dim]`.
    L1(Extent),
    /// `[extent, L2_dim]`.
    L2(Extent),
    /// `[extent, L3_dim]`.
    L3(Extent),
    /// `[weight_numel]` when weights are shared, else `[extent, weight_numel]`.
    Weights(Extent),
    /// `[extent]`.
    Vector(Extent),
    /// `[extent]` when the payload is deterministic, any shape otherwise.
    VectorIfDeterministic(Extent),
    /// `[workspace_size]`.
    Workspace,
}

impl Shape {
    fn extent(self, plan: &KernelPlan) -> Option<Extent> {
        match self {
            Self::L1(extent) | Self::L2(extent) | Self::L3(extent) | Self::Vector(extent) => Some(extent),
            Self::Weights(extent) => (!plan.shared_weights).then_some(extent),
            Self::VectorIfDeterministic(_) | Self::Workspace => None,
        }
    }

    /// The shape in numbers, `None` where any shape will do.
    fn dimensions(self, plan: &KernelPlan, extents: &Extents) -> Option<SmallVec<[u64; 2]>> {
        Some(match self {
            Self::L1(extent) => SmallVec::from_slice(&[extents.get(extent), plan.l1_dim]),
            Self::L2(extent) => SmallVec::from_slice(&[extents.get(extent), plan.l2_dim]),
            Self::L3(extent) => SmallVec::from_slice(&[extents.get(extent), plan.l3_dim]),
            Self::Weights(_) if plan.shared_weights => SmallVec::from_slice(&[plan.weight_numel]),
            Self::Weights(extent) => SmallVec::from_slice(&[extents.get(extent), plan.weight_numel]),
            Self::Vector(extent) => SmallVec::from_slice(&[extents.get(extent)]),
            Self::VectorIfDeterministic(extent) if plan.deterministic => SmallVec::from_slice(&[extents.get(extent)]),
            Self::VectorIfDeterministic(_) => return None,
            Self::Workspace => SmallVec::from_slice(&[plan.workspace_bytes]),
        })
    }
}

/// What came: the element type and dimensions of one tensor of a call.
#[derive(Debug, Clone, Copy)]
pub struct TensorView<'a> {
    /// The element type; `Err` holds the host's own number of a type that OEQ has no name for.
    pub dtype: std::result::Result<Dtype, i32>,
    /// Dimensions.
    pub dimensions: &'a [i64],
}

/// The extents of one checked call, and the sizes that follow from them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extents {
    values: [u64; 3],
    /// Bytes of each result, in order.
    pub result_bytes: SmallVec<[u64; 5]>,
    /// Whether the call has the extra workspace result.
    pub has_workspace_result: bool,
}

impl Extents {
    /// The value of an extent; 0 for one that the call does not have.
    #[must_use]
    pub fn get(&self, extent: Extent) -> u64 {
        self.values[extent as usize]
    }
}

struct Dimensions<'a>(&'a [i64]);

impl fmt::Display for Dimensions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[")?;
        for (index, dimension) in self.0.iter().enumerate() {
            write!(f, "{}{dimension}", if index == 0 { "" } else { ", " })?;
        }
        write!(f, "]")
    }
}

/// Checks the tensors of a call against what its family says, and answers the extents.
///
/// # Errors
/// A wrong number of operands or results, element type, rank or dimension; the text names the tensor, what was expected
/// and what came.
pub fn check(
    call: &Call,
    plan: &KernelPlan,
    operands: &[TensorView<'_>],
    results: &[TensorView<'_>],
) -> Result<Extents> {
    if operands.len() != call.operands.len() {
        return Err(count_error("operands", call.operands, operands.len(), false));
    }
    let has_workspace_result = call.workspace_result && results.len() == call.results.len() + 1;
    if results.len() != call.results.len() && !has_workspace_result {
        return Err(count_error("results", call.results, results.len(), call.workspace_result));
    }

    let mut extents = Extents { values: [0; 3], result_bytes: SmallVec::new(), has_workspace_result };
    let mut definers: [Option<&str>; 3] = [None; 3];
    for extent in Extent::ALL {
        // A plain vector is the clearest definition (an edge list says how many edges there are); else the first tensor.
        let mut carriers = call.operands.iter().zip(operands).filter(|(s, _)| s.shape.extent(plan) == Some(extent));
        let definer = carriers.clone().find(|(s, _)| s.shape == Shape::Vector(extent)).or_else(|| carriers.next());
        let Some((spec, view)) = definer else { continue };
        let rank = if spec.shape == Shape::Vector(extent) { 1 } else { 2 };
        if view.dimensions.len() != rank {
            return Err(Error::invalid(format!(
                "tensor `{}` has shape {}; expected rank {rank}, its first dimension the {}",
                spec.name,
                Dimensions(view.dimensions),
                extent.noun()
            )));
        }
        extents.values[extent as usize] = u64::try_from(view.dimensions[0]).map_err(|_| {
            Error::invalid(format!("tensor `{}` has a negative dimension: {}", spec.name, Dimensions(view.dimensions)))
        })?;
        definers[extent as usize] = Some(spec.name);
    }

    for (spec, view) in call.operands.iter().zip(operands) {
        check_tensor(spec, view, plan, &extents, &definers)?;
    }
    for (spec, view) in call.results.iter().zip(results) {
        check_tensor(spec, view, plan, &extents, &definers)?;
        extents.result_bytes.push(byte_count(spec, view)?);
    }
    if has_workspace_result {
        let spec = TensorSpec { name: "workspace (result)", element: Element::Byte, shape: Shape::Workspace };
        check_tensor(&spec, &results[call.results.len()], plan, &extents, &definers)?;
    }
    Ok(extents)
}

fn count_error(what: &str, specs: &[TensorSpec], found: usize, workspace: bool) -> Error {
    let names: Vec<&str> = specs.iter().map(|spec| spec.name).collect();
    let or_more = if workspace { ", and optionally the workspace" } else { "" };
    Error::invalid(format!("the call has {found} {what}; expected {} ({}{or_more})", specs.len(), names.join(", ")))
}

fn check_tensor(
    spec: &TensorSpec,
    view: &TensorView<'_>,
    plan: &KernelPlan,
    extents: &Extents,
    definers: &[Option<&str>; 3],
) -> Result<()> {
    let Some(expected) = spec.shape.dimensions(plan, extents) else { return Ok(()) };
    let dtype = spec.element.dtype(plan);
    if let Some(dtype) = dtype {
        if view.dtype != Ok(dtype) {
            let found = match view.dtype {
                Ok(found) => found.name().to_owned(),
                Err(code) => format!("XLA type {code}"),
            };
            return Err(Error::invalid(format!(
                "tensor `{}` has element type {found}; expected {}",
                spec.name,
                dtype.name()
            )));
        }
    }
    let same = expected.len() == view.dimensions.len()
        && expected.iter().zip(view.dimensions).all(|(want, have)| i64::try_from(*want) == Ok(*have));
    if same {
        return Ok(());
    }
    let expected: Vec<i64> = expected.iter().map(|d| i64::try_from(*d).unwrap_or(i64::MAX)).collect();
    let origin = match spec.shape.extent(plan) {
        Some(extent) => match definers[extent as usize] {
            Some(definer) if definer != spec.name => format!(" (the {} comes from `{definer}`)", extent.noun()),
            _ => String::new(),
        },
        None => String::new(),
    };
    Err(Error::invalid(format!(
        "tensor `{}` has shape {}; expected {}{origin}",
        spec.name,
        Dimensions(view.dimensions),
        Dimensions(&expected)
    )))
}

fn byte_count(spec: &TensorSpec, view: &TensorView<'_>) -> Result<u64> {
    let element = view.dtype.map_or(0, Dtype::bytes);
    view.dimensions
        .iter()
        .try_fold(element, |bytes, dimension| bytes.checked_mul(u64::try_from(*dimension).ok()?))
        .filter(|bytes| i64::try_from(*bytes).is_ok())
        .ok_or_else(|| {
            Error::invalid(format!("tensor `{}` of shape {} is too large", spec.name, Dimensions(view.dimensions)))
        })
}
