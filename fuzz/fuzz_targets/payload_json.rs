//! JSON payloads, for both families: what is accepted keeps the promises of `KernelPlan`, and what is refused is
//! refused with a short text.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oeq_native::payload::{Dtype, EntryPoint, KernelPlan, Requirements};

const ENTRY_POINTS: &[EntryPoint] = &[
    EntryPoint { name: "forward", deterministic_only: false },
    EntryPoint { name: "backward", deterministic_only: true },
];

fuzz_target!(|text: &[u8]| {
    for convolution in [false, true] {
        match KernelPlan::from_json(text, &Requirements { entry_points: ENTRY_POINTS, convolution }) {
            Err(error) => assert!(error.message().len() < 1000, "{error}"),
            Ok(plan) => {
                for size in [plan.forward, plan.backward, plan.double_backward] {
                    assert!(size.blocks >= 1 && size.blocks < 1 << 31 && size.warp_size == 32);
                    assert!(size.threads % 32 == 0 && (32..=1024).contains(&size.threads));
                    assert!(size.shared_bytes <= 1 << 20);
                }
                for dim in [plan.l1_dim, plan.l2_dim, plan.l3_dim, plan.weight_numel] {
                    assert!((1..=1 << 40).contains(&dim));
                }
                assert!(plan.workspace_bytes <= 1 << 40 && (!plan.deterministic || plan.workspace_bytes > 0));
                assert_eq!(plan.index_dtype.is_some(), convolution);
                assert!(matches!(plan.irrep_dtype, Dtype::F32 | Dtype::F64));
                assert!(plan.source.contains("__global__") && plan.source.contains("forward"));
                assert!(!plan.source.contains('\0') && (convolution || !plan.deterministic));
            }
        }
    }
});
