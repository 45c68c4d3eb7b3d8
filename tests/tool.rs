//! The command line tool, run as a program on real models.
//!
//! `OEQ_TEST_MODELS` names the folder that `tests/python/make_models.py` and `tests/python/make_forms.py` filled, and
//! `OEQ_TEST_NVRTC` the NVRTC library; `tests/run.sh` sets both.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, HashSet};
use std::env;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn variable(name: &str, what: &str) -> PathBuf {
    let Some(value) = env::var_os(name) else { panic!("set {name} to {what}; tests/run.sh does") };
    PathBuf::from(value)
}

fn models() -> PathBuf {
    variable("OEQ_TEST_MODELS", "the folder that tests/python/make_models.py wrote")
}

/// What a reader must find in each model.
fn listing() -> serde_json::Map<String, Value> {
    let path = models().join("models.json");
    let text = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let Value::Object(listing) = serde_json::from_slice(&text).unwrap() else { panic!("{}", path.display()) };
    assert!(!listing.is_empty());
    listing
}

fn tool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_oeq"));
    for variable in ["OEQ_COMPILE_THREADS", "OEQ_COMPILE_UNITS"] {
        command.env_remove(variable);
    }
    command
}

fn run(arguments: &[&str]) -> Output {
    tool().args(arguments).output().unwrap()
}

/// Runs the tool, which must succeed without a complaint, and gives its output.
fn good(arguments: &[&str]) -> String {
    let output = run(arguments);
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && complaint.is_empty(), "{arguments:?}: {:?}\n{complaint}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&good(&[arguments, &["--json"]].concat())).unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn inspect(path: &Path) -> Value {
    let Value::Array(mut files) = json(&["inspect", text(path)]) else { panic!("no array") };
    assert_eq!(files.len(), 1);
    files.remove(0)
}

/// Compares what was found in a file with what the model was made with.
fn compare(path: &Path, expected: &Value) {
    let found = inspect(path);
    let place = path.display();
    let mut calls: BTreeMap<&str, u64> = BTreeMap::new();
    for call in found["calls"].as_array().unwrap() {
        *calls.entry(call["target"].as_str().unwrap()).or_default() += 1;
        assert_eq!(call["api_version"], 4, "{place}");
        assert!(call["error"].is_null() && call["sites"].as_u64().unwrap() >= 1, "{place}: {call}");
    }
    let wanted: BTreeMap<&str, u64> =
        expected["calls"].as_object().unwrap().iter().map(|(name, times)| (&**name, times.as_u64().unwrap())).collect();
    assert_eq!(calls, wanted, "{place}");
    let kernels = found["kernels"].as_array().unwrap();
    assert_eq!(kernels.len() as u64, expected["kernels"].as_u64().unwrap(), "{place}");
    for kernel in kernels {
        assert_eq!(kernel["form"], expected["form"], "{place}");
        let plan = &kernel["plan"];
        if kernel["family"] == "convolution" {
            // The model passes a workspace of the size that the payload asks for.
            let size = Value::from(format!("ui8[{}]", plan["workspace_bytes"]));
            let passed = |call: &Value| call["operands"].as_array().unwrap().contains(&size);
            assert!(found["calls"].as_array().unwrap().iter().any(passed), "{place}: {kernel}");
        }
        assert!(plan["entry_points"].as_array().unwrap().contains(&"double_backward_B".into()), "{place}");
    }
    let bytes = &found["payload_bytes"];
    let unique: u64 = kernels.iter().map(|kernel| kernel["bytes"].as_u64().unwrap()).sum();
    let referenced: u64 =
        kernels.iter().map(|kernel| kernel["bytes"].as_u64().unwrap() * kernel["sites"].as_u64().unwrap()).sum();
    assert_eq!((bytes["unique"].as_u64(), bytes["referenced"].as_u64()), (Some(unique), Some(referenced)), "{place}");
    assert_eq!(found["found"], "read", "{place}");
}

#[test]
fn every_container_of_every_model_says_the_same() {
    let models = models();
    for (name, expected) in &listing() {
        let files = ["jaxexport", "mlirbc", "mlir"].map(|ending| models.join(format!("{name}.{ending}")));
        let kinds = files.each_ref().map(|file| {
            compare(file, expected);
            inspect(file)["container"]["kind"].clone()
        });
        assert_eq!(kinds, ["jax_export", "bytecode", "text"].map(Value::from));
        let [export, bytecode, text] = files.each_ref().map(|file| {
            let found = inspect(file);
            (found["calls"].clone(), found["kernels"].clone())
        });
        assert!(export == bytecode && bytecode == text, "{name}");
    }
}

#[test]
fn an_artifact_tells_its_facts() {
    let container = inspect(&models().join("mace.jaxexport"))["container"].clone();
    assert_eq!(container["platforms"], serde_json::json!(["cuda"]));
    assert_eq!(container["devices"], 1);
    assert!(container["calling_convention_version"].as_u64().unwrap() >= 9, "{container}");
    assert!(!container["function"].as_str().unwrap().is_empty());
    let module = &container["modules"][0];
    assert!(module["producer"].as_str().unwrap().starts_with("StableHLO_v"), "{module}");
    assert!(module["dialects"].as_array().unwrap().contains(&"vhlo".into()));
}

#[test]
fn every_version_of_the_bytecode_is_read() {
    let forms = models().join("forms");
    let listing = listing();
    let mut seen = HashSet::new();
    let entries =
        fs::read_dir(&forms).unwrap_or_else(|error| panic!("{}: {error}: run make_forms.py", forms.display()));
    for entry in entries {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap().to_str().unwrap();
        let (name, expected) = listing.iter().find(|(name, _)| file.starts_with(&format!("{name}."))).unwrap();
        compare(&path, expected);
        let (found, original) = (inspect(&path), inspect(&models().join(format!("{name}.mlir"))));
        assert_eq!(found["calls"], original["calls"], "{file}");
        assert_eq!(found["kernels"], original["kernels"], "{file}");
        if let Some(version) = found["container"]["bytecode_version"].as_u64() {
            let vhlo = found["container"]["dialects"].as_array().unwrap().contains(&"vhlo".into());
            seen.insert((version, vhlo));
        } else {
            seen.insert((99, false));
        }
    }
    for version in 0..=6 {
        assert!(seen.contains(&(version, false)), "no bytecode of version {version}: {seen:?}");
    }
    assert!(seen.iter().any(|&(_, vhlo)| vhlo) && seen.contains(&(99, false)), "{seen:?}");
}

#[test]
fn damaged_models_are_refused_and_nothing_panics() {
    for name in ["0.5.2_conv_backward.mlirbc", "0.7.0_tp_forward.jaxexport", "0.7.0_tp_forward.mlir"] {
        let whole = fs::read(models().join(name)).unwrap();
        let read = |bytes: &[u8]| oeq_native::model::read(bytes).and_then(|model| oeq_native::model::survey(&model));
        assert!(read(&whole).is_ok(), "{name}");
        // Text ends with definitions of locations, which nobody misses.
        let needed =
            if name.ends_with("mlir") { whole.iter().rposition(|&byte| byte == b'}').unwrap() } else { whole.len() };
        for part in 1..199 {
            let end = needed * part / 200;
            let outcome = read(&whole[..end]);
            assert!(outcome.is_err(), "{name} cut to {end} of {}", whole.len());
        }
        // Around the payload lie the tables and the operations: a changed byte there goes anywhere.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut random = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let edge = 1500.min(whole.len() as u64 / 2);
        for _ in 0..500 {
            let mut bytes = whole.clone();
            for _ in 0..=random() % 3 {
                let offset = random() % edge;
                let at = if random() % 2 == 0 { offset } else { whole.len() as u64 - 1 - offset };
                bytes[usize::try_from(at).unwrap()] = random().to_le_bytes()[0];
            }
            let _ = read(&bytes); // It must come back, whatever it says.
        }
    }
}

#[test]
fn targets_are_listed() {
    let Value::Array(targets) = json(&["targets"]) else { panic!("no array") };
    let find = |name: &str| targets.iter().find(|target| target["name"] == name).unwrap();
    assert_eq!(find("tp_forward")["derivative"], 0);
    assert_eq!(find("conv_double_backward")["derivative"], 2);
    assert!(find("oeq_convolution")["derivative"].is_null());
    for target in &targets {
        let stages = target["stages"].as_array().unwrap();
        assert!(stages.contains(&"instantiate".into()) && stages.contains(&"execute".into()), "{target}");
        assert!(["tensor_product", "convolution"].contains(&target["family"].as_str().unwrap()), "{target}");
    }
    let plain = good(&["targets"]);
    assert!(targets.iter().all(|target| plain.contains(target["name"].as_str().unwrap())));
}

/// The payload of a model's first kernel.
fn payload() -> Vec<u8> {
    let model = oeq_native::model::read(&fs::read(models().join("0.7.0_conv_forward.mlirbc")).unwrap()).unwrap();
    oeq_native::model::survey(&model).unwrap().kernels[0].identity.to_vec()
}

#[test]
fn a_bare_payload_comes_from_standard_input() {
    let feed = |bytes: &[u8], arguments: &[&str]| {
        let mut command = tool();
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        child.wait_with_output().unwrap()
    };
    let payload = payload();
    let output = feed(&payload, &["inspect", "-", "--json"]);
    assert!(output.status.success());
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found[0]["container"]["kind"], "payload");
    assert_eq!(found[0]["kernels"][0]["family"], "convolution");
    assert_eq!(found[0]["kernels"][0]["bytes"], payload.len());

    // One number changed to what cannot be: named in the complaint and in the output, and the status says so.
    let broken = String::from_utf8(payload).unwrap().replacen("\"num_blocks\": ", "\"num_blocks\": -", 1);
    for json in [&[][..], &["--json"]] {
        let output = feed(broken.as_bytes(), &[&["inspect", "-"], json].concat());
        assert_eq!(output.status.code(), Some(1));
        for stream in [&output.stdout, &output.stderr] {
            let stream = String::from_utf8_lossy(stream);
            assert!(stream.contains("num_blocks") && stream.contains("convolution"), "{stream}");
        }
    }
}

#[test]
fn what_is_wrong_goes_to_standard_error() {
    let folder = env::temp_dir().join(format!("oeq-tool-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let garbage = folder.join("garbage");
    fs::write(&garbage, b"not a model").unwrap();
    let good_model = models().join("0.7.0_tp_forward.mlir");
    let missing = folder.join("missing");
    for (arguments, complaint) in [
        (vec!["inspect", text(&garbage)], "are no model"),
        (vec!["inspect", text(&missing), "--json"], "missing"),
        (vec!["compile", text(&garbage), "--arch", "sm_90"], "no kernel to compile"),
        (vec!["compile", text(&garbage), "--arch", "sm_ninety"], "not a device architecture"),
        (vec!["compile", text(&good_model)], "--arch"),
        (vec!["frobnicate"], "frobnicate"),
    ] {
        let output = run(&arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(complaint), "{arguments:?}: {error}");
        assert!(!error.contains("panicked"), "{error}");
    }
    // A file that cannot be read does not hide the one that can.
    let output = run(&["inspect", text(&garbage), text(&good_model), "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found.as_array().unwrap().len(), 1);
    assert_eq!(found[0]["calls"][0]["target"], "tp_forward");
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let listing = listing();
    let files: Vec<PathBuf> = listing.keys().map(|name| models().join(format!("{name}.mlirbc"))).collect();
    let mut command = tool();
    // Much more than a pipe holds.
    for _ in 0..20 {
        command.args(&files);
    }
    let mut arguments = tool();
    arguments.arg("inspect").args(command.get_args()).arg("--json").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = arguments.spawn().unwrap();
    let mut first = [0; 10];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap(); // And the pipe is closed.
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty());
}

#[test]
fn kernels_compile_side_by_side_each_once() {
    let nvrtc = variable("OEQ_TEST_NVRTC", "an NVRTC library or its directory");
    let models = models();
    let (first, same) = (models.join("0.7.0_conv_forward.jaxexport"), models.join("0.7.0_conv_backward.mlir"));
    let other = models.join("0.5.2_tp_forward.mlirbc");
    let compile = |extra: &[&str]| {
        let mut command = tool();
        command.env("OEQ_NVRTC", &nvrtc).args(["compile", "--arch", "sm_90"]).args([&first, &same, &other]).args(extra);
        let output = command.output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success() && complaint.is_empty(), "{complaint}");
        String::from_utf8(output.stdout).unwrap()
    };
    let found: Value = serde_json::from_str(&compile(&["--json", "--threads", "2"])).unwrap();
    let kernels = found["kernels"].as_array().unwrap();
    // The first two name one payload.
    let families: Vec<&str> = kernels.iter().map(|kernel| kernel["family"].as_str().unwrap()).collect();
    assert_eq!(families, ["convolution", "tensor_product"]);
    let number = |value: &Value| value.as_f64().unwrap();
    for kernel in kernels {
        assert!(
            kernel["bytes"].as_u64().unwrap() > 10_000 && kernel["image_bytes"].as_u64().unwrap() > 1000,
            "{kernel}"
        );
        let units: f64 = kernel["units"].as_array().unwrap().iter().map(|unit| number(&unit["seconds"])).sum();
        assert!(units > 0.0 && (units - number(&kernel["seconds"])).abs() < 1e-6, "{kernel}");
        assert_eq!(kernel["arch"], "sm_90");
    }
    let sum: f64 = kernels.iter().map(|kernel| number(&kernel["seconds"])).sum();
    assert!((sum - number(&found["sum_s"])).abs() < 1e-6);
    assert!((number(&found["speed_up"]) - sum / number(&found["wall_s"])).abs() < 1e-6);
    assert_eq!(found["workers"], 2);
    // Nobody is ever busy for longer than the clock.
    assert!(number(&found["sum_s"]) <= 2.0 * number(&found["wall_s"]) * 1.01, "{found}");

    let plain = compile(&["--whole", "--threads", "1", "--arch", "sm_80"]);
    assert_eq!(plain.matches("sm_80").count(), 2, "{plain}");
    assert!(plain.contains("4 kernel(s), 1 worker(s)") && plain.contains("speed-up"), "{plain}");
}

#[test]
fn a_kernel_that_does_not_compile_is_reported_with_the_others_compiled() {
    let nvrtc = variable("OEQ_TEST_NVRTC", "an NVRTC library or its directory");
    let file = env::temp_dir().join(format!("oeq-broken-{}.json", std::process::id()));
    let broken = String::from_utf8(payload()).unwrap().replacen("threadIdx.x", "thread_index_x", 1);
    fs::write(&file, broken).unwrap();
    let arguments = ["compile", text(&file), "--arch", "sm_90", "--whole", "--json"];
    let good_model = models().join("0.7.0_tp_forward.mlir");
    let output = tool().env("OEQ_NVRTC", nvrtc).args(arguments).arg(&good_model).output().unwrap();
    fs::remove_file(&file).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("thread_index_x"));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(found["kernels"][0]["error"].as_str().unwrap().contains("thread_index_x"));
    assert!(found["kernels"][1]["error"].is_null() && found["kernels"][1]["image_bytes"].as_u64().unwrap() > 0);
}
