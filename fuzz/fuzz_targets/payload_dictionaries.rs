//! Payloads of the older form. The input edits a valid payload, so that most members are right most of the time. The
//! result must be what the same members give as JSON, and the identity must not depend on their order.

#![no_main]

use std::collections::HashSet;
use std::fmt::Write;

use libfuzzer_sys::fuzz_target;
use oeq_native::payload::{DictionaryPayload, EntryPoint, KernelPlan, Requirements};

const ENTRY_POINTS: &[EntryPoint] = &[EntryPoint { name: "forward", deterministic_only: false }];
const LAUNCH: &[(&str, i64)] = &[("num_blocks", 1), ("num_threads", 32), ("warp_size", 32), ("smem", 0)];
const PROPERTIES: &[(&str, i64)] = &[
    ("L1_dim", 1),
    ("L2_dim", 1),
    ("L3_dim", 1),
    ("weight_numel", 1),
    ("shared_weights", 0),
    ("irrep_dtype", 1),
    ("weight_dtype", 2),
    ("workspace_size", 1),
    ("deterministic", 1),
    ("idx_dtype", 3),
];
const NAMES: [&str; 4] = ["forward_config", "backward_config", "double_backward_config", "kernel_prop"];

/// What to do to a member: which dictionary, which member, a new name, a new value.
type Edit<'a> = (u8, u8, Option<&'a str>, Option<i64>);

fn json_string(text: &str) -> String {
    text.chars().fold(String::from("\""), |mut out, character| {
        match character {
            '"' | '\\' => write!(out, "\\{character}").unwrap(),
            '\0'..='\x1f' => write!(out, "\\u{:04x}", u32::from(character)).unwrap(),
            _ => out.push(character),
        }
        out
    }) + "\""
}

fuzz_target!(|input: (Vec<Edit<'_>>, bool, bool, &[u8])| {
    let (edits, convolution, whole_source, text) = input;
    let mut given = [LAUNCH, LAUNCH, LAUNCH, PROPERTIES].map(<[_]>::to_vec);
    for (which, at, name, value) in edits {
        let pairs = &mut given[usize::from(which % 4)];
        let at = usize::from(at) % (pairs.len() + 1);
        match (name, value) {
            (None, None) if at < pairs.len() => drop(pairs.swap_remove(at)),
            (None, Some(value)) if at < pairs.len() => pairs[at].1 = value,
            (name, value) => pairs.push((name.unwrap_or("smem"), value.unwrap_or(1))),
        }
    }
    let mut source = if whole_source { Vec::new() } else { b"__global__ void forward() {}\n".to_vec() };
    source.extend_from_slice(text);

    let needs = Requirements { entry_points: ENTRY_POINTS, convolution };
    let [forward_config, backward_config, double_backward_config, kernel_prop] = &given;
    let payload =
        DictionaryPayload { source: &source, forward_config, backward_config, double_backward_config, kernel_prop };
    let result = KernelPlan::from_dictionaries(&payload, &needs);

    let mut reversed = given.clone();
    reversed.iter_mut().for_each(|pairs| pairs.reverse());
    let [forward_config, backward_config, double_backward_config, kernel_prop] = &reversed;
    let other =
        DictionaryPayload { source: &source, forward_config, backward_config, double_backward_config, kernel_prop };
    assert_eq!(payload.identity_bytes(), other.identity_bytes());

    let Ok(source) = std::str::from_utf8(&source) else {
        assert!(result.is_err());
        return;
    };
    let mut json = format!("{{\"kernel\":{}", json_string(source));
    for (name, pairs) in NAMES.iter().zip(&given) {
        let members: Vec<_> = pairs.iter().map(|(name, value)| format!("{}:{value}", json_string(name))).collect();
        write!(json, ",\"{name}\":{{{}}}", members.join(",")).unwrap();
    }
    json.push('}');
    assert_eq!(result.is_ok(), KernelPlan::from_json(json.as_bytes(), &needs).is_ok(), "{result:?}");
    if let Ok(plan) = result {
        assert_eq!(Ok(plan), KernelPlan::from_json(json.as_bytes(), &needs));
        let launch: HashSet<_> =
            given[0].iter().filter(|(name, _)| LAUNCH.iter().any(|known| known.0 == *name)).collect();
        assert_eq!(launch.len(), LAUNCH.len());
    }
});
