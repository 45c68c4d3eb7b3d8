//! GPUs by name: what OEQ's code generator asks of a device, for exporting a model on a machine that does not have it.

use super::cuda::DeviceProperties;
use crate::compile::Architecture;
use crate::error::{Error, Result};

/// Name, compute capability, multiprocessors, opt-in shared memory per block in bytes.
const KNOWN: &[(&str, (i32, i32), i32, i32)] = &[
    ("V100", (7, 0), 80, 98_304),
    ("T4", (7, 5), 40, 65_536),
    ("A100", (8, 0), 108, 166_912),
    ("A10", (8, 6), 72, 101_376),
    ("A40", (8, 6), 84, 101_376),
    ("A6000", (8, 6), 84, 101_376),
    ("RTX3090", (8, 6), 82, 101_376),
    ("L4", (8, 9), 58, 101_376),
    ("L40S", (8, 9), 142, 101_376),
    ("RTX4090", (8, 9), 128, 101_376),
    ("H100", (9, 0), 132, 232_448),
    ("H200", (9, 0), 132, 232_448),
    ("GH200", (9, 0), 132, 232_448),
    ("B200", (10, 0), 148, 232_448),
    ("RTX5090", (12, 0), 170, 101_376),
];

/// The most shared memory that any block can be given, bytes.
const MOST_SHARED: i32 = 1 << 20;

/// The device that a description names: a known name, or `sm_90,132,232448` for architecture, multiprocessors and opt-in
/// shared memory per block in bytes.
///
/// # Errors
/// Neither; the text lists the known names.
pub fn describe(description: &str) -> Result<DeviceProperties> {
    let wanted = description.trim();
    let plain = |text: &str| text.replace([' ', '-', '_'], "").to_ascii_uppercase();
    if let Some((name, (major, minor), multiprocessors, shared)) = KNOWN.iter().find(|k| k.0 == plain(wanted)) {
        return Ok(properties(name, *major, *minor, *multiprocessors, *shared));
    }
    let wrong = || {
        let names: Vec<&str> = KNOWN.iter().map(|known| known.0).collect();
        Error::invalid(format!(
            "device description `{wanted}` is not understood; expected one of {}, or ARCHITECTURE,MULTIPROCESSORS,\
             SHARED_BYTES such as sm_90,132,232448",
            names.join(", ")
        ))
    };
    let parts: Vec<&str> = wanted.split(',').map(str::trim).collect();
    let [architecture, multiprocessors, shared] = parts[..] else { return Err(wrong()) };
    let architecture: Architecture = architecture.parse().map_err(|_| wrong())?;
    let multiprocessors: i32 = multiprocessors.parse().map_err(|_| wrong())?;
    let shared: i32 = shared.parse().map_err(|_| wrong())?;
    if !(1..=1 << 16).contains(&multiprocessors) || !(1..=MOST_SHARED).contains(&shared) {
        return Err(wrong());
    }
    Ok(properties(wanted, architecture.major.into(), architecture.minor.into(), multiprocessors, shared))
}

fn properties(name: &str, major: i32, minor: i32, multiprocessors: i32, shared: i32) -> DeviceProperties {
    DeviceProperties {
        name: name.to_owned(),
        compute_major: major,
        compute_minor: minor,
        multiprocessor_count: multiprocessors,
        warp_size: 32,
        shared_memory_per_block: shared,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed test should panic")]

    use super::*;

    #[test]
    fn names_and_numbers_are_understood() {
        let by_name = describe("h200").unwrap();
        let by_numbers = describe("sm_90, 132, 232448").unwrap();
        assert_eq!((by_name.compute_major, by_name.compute_minor), (9, 0));
        assert_eq!(by_name.shared_memory_per_block, by_numbers.shared_memory_per_block);
        assert_eq!(describe("RTX 4090").unwrap().multiprocessor_count, 128);
    }

    #[test]
    fn anything_else_is_an_error_that_lists_what_can_be_said() {
        for text in ["", "H300", "sm_90", "sm_90,132", "sm_90,0,1", "sm_90,132,-5", "sm_90,132,232448,1"] {
            let error = describe(text).unwrap_err();
            assert!(error.message().contains("H200") && error.message().contains("sm_90,132,232448"), "{error}");
        }
    }
}
