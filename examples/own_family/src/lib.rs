//! A kernel family of another crate: `row_norms`, the squared norm of each row of a batch of irreps.
//!
//! A family is data: what it demands of a payload, and for each derivative order the operands, results, zeroed results and
//! launches. A target is a type with a name. [`submit_targets!`](oeq_native::submit_targets) puts it into the table; this
//! crate's shared library then registers it, with OEQ's targets, in any XLA, and its build of the tool lists it.

use oeq_native::layout::{Call, Element, Extent, Family, Launch, Parameter, Shape, Size, TensorSpec};
use oeq_native::payload::{EntryPoint, Requirements};
use oeq_native::registry::{Derivative, Target};

/// The family: one call, forward, of one launch.
pub static FAMILY: Family = Family {
    name: "row_norms",
    requirements: Requirements {
        entry_points: &[EntryPoint { name: "row_norms", deterministic_only: false }],
        convolution: false,
    },
    calls: &[Call {
        operands: &[TensorSpec { name: "x", element: Element::Irreps, shape: Shape::L1(Extent::Batch) }],
        results: &[TensorSpec { name: "norms", element: Element::Irreps, shape: Shape::L3(Extent::Batch) }],
        workspace_result: false,
        zeroed: &[],
        work: Extent::Batch,
        launches: &[Launch {
            entry: "row_norms",
            size: Size::Forward,
            parameters: &[Parameter::Count(Extent::Batch), Parameter::Operand(0), Parameter::Result(0)],
            fixup: None,
            cost: 1,
        }],
    }],
};

/// `norms[i] = sum over j of x[i, j]^2`, for x of shape `[batch, L1_dim]` and norms of shape `[batch, 1]`.
pub struct RowNorms;

impl Target for RowNorms {
    const NAME: &'static str = "row_norms";
    const FAMILY: &'static Family = &FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(0);
}

oeq_native::submit_targets!(pub ANCHOR = [RowNorms]);

/// The payload of rows of `width` numbers (f32): what a model's custom call carries in its attribute `kernel`.
#[must_use]
pub fn payload(width: u32) -> String {
    // JSON's own escapes: the text goes into a string as it is.
    let source = format!(
        r"__global__ void row_norms(size_t rows, const float* x, float* norms) {{\n  size_t step = (size_t)gridDim.x * blockDim.x;\n  for (size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += step) {{\n    float sum = 0.0f;\n    for (int j = 0; j < {width}; ++j) sum += x[row * {width} + j] * x[row * {width} + j];\n    norms[row] = sum;\n  }}\n}}\n"
    );
    let launch = r#"{"num_blocks":64,"num_threads":128,"warp_size":32,"smem":0}"#;
    format!(
        r#"{{"kernel":"{source}","forward_config":{launch},"backward_config":{launch},"double_backward_config":{launch},"kernel_prop":{{"L1_dim":{width},"L2_dim":1,"L3_dim":1,"weight_numel":1,"shared_weights":1,"opt_level":3,"irrep_dtype":1,"weight_dtype":1,"workspace_size":0,"deterministic":1,"idx_dtype":0}}}}"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_is_in_the_table_beside_oeq_s() {
        let table = oeq_native::registry::table().unwrap();
        assert_eq!(table.find("row_norms").unwrap().family.name, "row_norms");
        assert_eq!(table.entries.len(), 9);
    }

    #[test]
    fn its_payload_is_valid_and_another_family_s_is_not() {
        let plan = oeq_native::payload::KernelPlan::from_json(payload(7).as_bytes(), &FAMILY.requirements).unwrap();
        assert_eq!((plan.l1_dim, plan.l3_dim), (7, 1));
        let broken = payload(7).replace("row_norms", "column_norms");
        let error = oeq_native::payload::KernelPlan::from_json(broken.as_bytes(), &FAMILY.requirements).unwrap_err();
        assert!(error.message().contains("row_norms"), "{error}");
    }
}
