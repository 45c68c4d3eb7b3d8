//! Sizes and offsets of `oeq.h`, printed by a C program, are those of the Rust side. `tests/link/run.sh` makes the list.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed test should panic")]

use std::collections::BTreeMap;
use std::mem::offset_of;

use oeq_native::capi::{FfiDeviceProperties, FfiHandler, FfiHandlerTable2, FfiHandlerTable3, FfiStats, FfiType};

#[test]
#[ignore = "run by tests/link/run.sh, which compiles the header"]
fn the_header_has_the_library_s_layout() {
    let file = std::env::var("OEQ_TEST_C_LAYOUT").expect("OEQ_TEST_C_LAYOUT names the list; run tests/link/run.sh");
    let text = std::fs::read_to_string(file).unwrap();
    let theirs: BTreeMap<&str, usize> =
        text.lines().map(|line| line.split_once(' ').unwrap()).map(|(name, n)| (name, n.parse().unwrap())).collect();
    let ours = BTreeMap::from([
        ("OeqFfiHandler", size_of::<FfiHandler>()),
        ("OeqFfiHandler.instantiate", offset_of!(FfiHandler, instantiate)),
        ("OeqFfiHandler.prepare", offset_of!(FfiHandler, prepare)),
        ("OeqFfiHandler.initialize", offset_of!(FfiHandler, initialize)),
        ("OeqFfiHandler.execute", offset_of!(FfiHandler, execute)),
        ("OeqFfiHandler.traits", offset_of!(FfiHandler, traits)),
        ("OeqFfiType", size_of::<FfiType>()),
        ("OeqFfiType.type_id", offset_of!(FfiType, type_id)),
        ("OeqFfiType.type_info", offset_of!(FfiType, type_info)),
        ("OeqFfiHandlerTableV2", size_of::<FfiHandlerTable2>()),
        ("OeqFfiHandlerTableV2.handlers", offset_of!(FfiHandlerTable2, handlers)),
        ("OeqFfiHandlerTable", size_of::<FfiHandlerTable3>()),
        ("OeqFfiHandlerTable.types", offset_of!(FfiHandlerTable3, types)),
        ("OeqFfiHandlerTable.handler_count", offset_of!(FfiHandlerTable3, handler_count)),
        ("OeqFfiHandlerTable.handlers", offset_of!(FfiHandlerTable3, handlers)),
        ("OeqStats", size_of::<FfiStats>()),
        ("OeqStats.compiled", offset_of!(FfiStats, compiled)),
        ("OeqStats.launches", offset_of!(FfiStats, launches)),
        ("OeqDeviceProperties", size_of::<FfiDeviceProperties>()),
        ("OeqDeviceProperties.compute_major", offset_of!(FfiDeviceProperties, compute_major)),
        ("OeqDeviceProperties.shared_memory_per_block", offset_of!(FfiDeviceProperties, shared_memory_per_block)),
    ]);
    assert_eq!(theirs, ours);
}
