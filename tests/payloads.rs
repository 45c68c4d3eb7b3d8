//! Payloads that OpenEquivariance itself wrote, in both of its forms.
//!
//! `tests/python/make_payloads.py` makes them; `OEQ_TEST_PAYLOADS` names the folder (`target/test-cache/payloads` by
//! default). What a plan must hold is read from the JSON text by another way than the one under test.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use oeq_native::payload::{DictionaryPayload, KernelPlan, LaunchSize, Requirements};
use oeq_native::source;
use oeq_native::targets::{convolution, tensor_product};
use serde_json::Value;

/// A payload of one form: its name, its bytes, and the same read as a general JSON value.
struct Given {
    name: String,
    text: Vec<u8>,
    value: Value,
}

impl Given {
    fn needs(&self) -> &'static Requirements {
        match self.name.split_once('_').unwrap().0 {
            "tp" => &tensor_product::FAMILY.requirements,
            "conv" => &convolution::FAMILY.requirements,
            other => panic!("{other} is no family"),
        }
    }

    fn number(&self, group: &str, member: &str) -> i64 {
        self.value[group][member].as_i64().unwrap_or_else(|| panic!("{}: {group}.{member}", self.name))
    }

    fn group(&self, name: &str) -> Vec<(&str, i64)> {
        self.value[name]
            .as_object()
            .unwrap()
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_i64().unwrap()))
            .collect()
    }
}

fn folder() -> PathBuf {
    std::env::var_os("OEQ_TEST_PAYLOADS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/test-cache/payloads"), PathBuf::from)
}

/// Every payload of a form; the folder itself holds the newer one.
fn payloads(form: &str) -> Vec<Given> {
    let folder = folder().join(form);
    let entries = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}; tests/run.sh makes the payloads", folder.display()));
    let mut found = Vec::new();
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.extension().is_some_and(|extension| extension == "json") {
            let text = std::fs::read(&path).unwrap();
            let value = serde_json::from_slice(&text).unwrap();
            found.push(Given { name: path.file_stem().unwrap().to_string_lossy().into_owned(), text, value });
        }
    }
    assert!(found.len() >= 20, "{} has only {} payloads", folder.display(), found.len());
    found
}

fn check(given: &Given, plan: &KernelPlan) {
    let name = &given.name;
    let launch = |size: &LaunchSize, group: &str| {
        let members = ["num_blocks", "num_threads", "warp_size", "smem"].map(|member| given.number(group, member));
        assert_eq!(
            [size.blocks, size.threads, size.warp_size, size.shared_bytes].map(i64::from),
            members,
            "{name}: {group}"
        );
    };
    launch(&plan.forward, "forward_config");
    launch(&plan.backward, "backward_config");
    launch(&plan.double_backward, "double_backward_config");
    let property = |member| given.number("kernel_prop", member);
    let dimensions =
        [plan.l1_dim, plan.l2_dim, plan.l3_dim, plan.weight_numel].map(|value| i64::try_from(value).unwrap());
    assert_eq!(dimensions, ["L1_dim", "L2_dim", "L3_dim", "weight_numel"].map(property), "{name}");
    assert_eq!(i64::from(plan.shared_weights), property("shared_weights"), "{name}");
    let bits = |code| ["", "f32", "f64", "i32", "i64", "u8"][usize::try_from(code).unwrap()];
    assert_eq!(plan.irrep_dtype.name(), bits(property("irrep_dtype")), "{name}");
    assert_eq!(plan.weight_dtype.name(), bits(property("weight_dtype")), "{name}");
    if name.starts_with("conv") {
        assert_eq!(plan.index_dtype.unwrap().name(), bits(property("idx_dtype")), "{name}");
        assert_eq!(i64::try_from(plan.workspace_bytes).unwrap(), property("workspace_size"), "{name}");
        assert_eq!(i64::from(plan.deterministic), property("deterministic"), "{name}");
    } else {
        assert_eq!((plan.index_dtype, plan.workspace_bytes, plan.deterministic), (None, 0, false), "{name}");
    }
    assert_eq!(plan.source, given.value["kernel"].as_str().unwrap(), "{name}");

    let defined: BTreeSet<String> =
        source::entry_points(&plan.source).unwrap().into_iter().map(|entry| entry.name).collect();
    for entry in given.needs().entry_points {
        if plan.deterministic || !entry.deterministic_only {
            assert!(defined.contains(entry.name), "{name} has no {}", entry.name);
        }
    }
}

#[test]
fn json_payloads_of_every_kind_become_plans() {
    let mut kinds = BTreeSet::new();
    for given in payloads("") {
        let plan =
            KernelPlan::from_json(&given.text, given.needs()).unwrap_or_else(|error| panic!("{}: {error}", given.name));
        check(&given, &plan);
        kinds.insert((plan.irrep_dtype.name(), plan.shared_weights, plan.deterministic));
    }
    // Both precisions, shared weights and the deterministic kind are all among them.
    assert!(kinds.len() >= 5, "{kinds:?}");
}

#[test]
fn dictionary_payloads_of_every_kind_become_plans() {
    for given in payloads("dictionaries") {
        let [forward, backward, double_backward, properties] =
            ["forward_config", "backward_config", "double_backward_config", "kernel_prop"]
                .map(|name| given.group(name));
        let payload = DictionaryPayload {
            source: given.value["kernel"].as_str().unwrap().as_bytes(),
            forward_config: &forward,
            backward_config: &backward,
            double_backward_config: &double_backward,
            kernel_prop: &properties,
        };
        let plan = KernelPlan::from_dictionaries(&payload, given.needs())
            .unwrap_or_else(|error| panic!("{}: {error}", given.name));
        check(&given, &plan);

        let reversed: Vec<_> = properties.iter().rev().copied().collect();
        let same = DictionaryPayload { kernel_prop: &reversed, ..payload };
        assert!(payload.identity_bytes() == same.identity_bytes(), "{}: order is not identity", given.name);
        let longer: Vec<_> = properties.iter().copied().chain([("later", 1)]).collect();
        let other = DictionaryPayload { kernel_prop: &longer, ..payload };
        assert_eq!(KernelPlan::from_dictionaries(&other, given.needs()).unwrap(), plan);
        assert!(payload.identity_bytes() != other.identity_bytes(), "{}: a member is identity", given.name);
    }
}

#[test]
fn a_payload_cut_short_anywhere_is_refused() {
    for given in payloads("").iter().filter(|given| given.name.ends_with("small")) {
        for length in (0..given.text.len()).step_by(97) {
            assert!(KernelPlan::from_json(&given.text[..length], given.needs()).is_err(), "{} at {length}", given.name);
        }
    }
}

#[test]
fn a_tensor_product_s_payload_is_not_a_convolution_s() {
    for given in payloads("").iter().filter(|given| given.name.starts_with("tp")) {
        let error = KernelPlan::from_json(&given.text, &convolution::FAMILY.requirements).unwrap_err();
        assert!(error.message().contains("workspace_size"), "{}: {error}", given.name);
    }
}
