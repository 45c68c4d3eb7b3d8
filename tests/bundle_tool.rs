//! `oeq compile --out` and `oeq bundle` with a real NVRTC: what they write is what the runtime looks for.
#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on should stop")]

mod common;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::*;
use oeq_native::compile::{Bundle, ImageKind, Key};
use oeq_native::runtime::Runtime;

struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tool-{name}-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    /// A file in the tree, as an argument.
    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn oeq(arguments: &[&str]) -> Output {
    let nvrtc = env::var_os("OEQ_TEST_NVRTC").unwrap_or_else(|| panic!("set OEQ_TEST_NVRTC; tests/run.sh does"));
    Command::new(env!("CARGO_BIN_EXE_oeq")).args(arguments).env("OEQ_NVRTC", nvrtc).output().unwrap()
}

fn good(arguments: &[&str]) -> String {
    let output = oeq(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn bad(arguments: &[&str]) -> String {
    let output = oeq(arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

fn keys(bundle: &Bundle) -> BTreeSet<Key> {
    bundle.images().map(|image| image.unwrap().key).collect()
}

/// `StableHLO` text of a model with one call of `conv_forward`, for 7 nodes and 20 edges.
fn model(payload: &str, nodes: i64) -> String {
    let escaped = payload.replace('\\', "\\5C").replace('"', "\\22").replace('\n', "\\0A");
    let operands = format!(
        "tensor<{nodes}x{L1}xf32>, tensor<20x{L2}xf32>, tensor<20x{W}xf32>, tensor<20xi32>, tensor<20xi32>, \
         tensor<{WORKSPACE}xui8>, tensor<20xi32>"
    );
    let arguments: Vec<String> =
        operands.split(", ").enumerate().map(|(index, kind)| format!("%arg{index}: {kind}")).collect();
    let names: Vec<String> = (0..arguments.len()).map(|index| format!("%arg{index}")).collect();
    format!(
        "module @model {{\n  func.func public @main({}) -> tensor<7x{L3}xf32> {{\n    %0 = stablehlo.custom_call \
         @conv_forward({}) {{api_version = 4 : i32, mhlo.backend_config = {{hash = 5 : i64, kernel = \"{escaped}\"}}}} : \
         ({operands}) -> tensor<7x{L3}xf32>\n    return %0 : tensor<7x{L3}xf32>\n  }}\n}}\n",
        arguments.join(", "),
        names.join(", ")
    )
}

#[test]
fn the_tool_s_bundle_has_the_units_that_the_runtime_looks_for() {
    let tree = Tree::new("units");
    let world = world();
    let payload = PayloadSpec { mark: "tool", ..PayloadSpec::default() }.json();
    let (l1, l2, l3) = (f32s(0x1000, &[5, L1]), f32s(0x2000, &[5, L2]), f32s(0x4000, &[5, L3]));
    let weights = f32s(0x3000, &[5, W]);
    let mut site = Site::new(3, &payload, 1).with(vec![l1.clone(), l2.clone(), weights.clone()], vec![l3.clone()]);
    site.run("tp_forward").unwrap();
    let gradients = vec![l1.clone(), l2.clone(), weights.clone()];
    Site::new(3, &payload, 1).with(vec![l1, l2, weights, l3], gradients).run("tp_backward").unwrap();
    assert_eq!(world.compilations("tool", ARCHITECTURES[0]), 2);
    let runtime = Runtime::global().unwrap();
    let theirs = keys(&Bundle::from_bytes("runtime", runtime.export_compiled()).unwrap());

    let (file, out) = (tree.path("payload.json"), tree.path("all.oeqb"));
    fs::write(&file, &payload).unwrap();
    // A bare payload names no calls: all four units, for both architectures.
    good(&["compile", &file, "--arch", "sm_90", "--arch", "sm_80", "--out", &out]);
    let bundle = Bundle::open(out.as_ref()).unwrap();
    bundle.verify().unwrap();
    let families: BTreeSet<String> = bundle.images().map(|image| image.unwrap().family).collect();
    let ours = keys(&bundle);
    assert!(theirs.len() == 4 && theirs.is_subset(&ours), "{families:?}");
    for image in bundle.images() {
        let image = image.unwrap();
        assert_eq!(image.image.kind(), ImageKind::Cubin);
        assert!(image.compiler.0 >= 12 && image.image.symbols.iter().all(|(_, symbol)| symbol.starts_with("_Z")));
    }
}

#[test]
fn only_what_a_model_calls_is_compiled() {
    let tree = Tree::new("calls");
    let payload =
        PayloadSpec { mark: "calls", convolution: true, deterministic: true, ..PayloadSpec::default() }.json();
    let (file, out) = (tree.path("model.mlir"), tree.path("model.oeqb"));
    fs::write(&file, model(&payload, 7)).unwrap();
    good(&["compile", &file, "--arch", "sm_90", "--out", &out]);
    let images: Vec<_> = Bundle::open(out.as_ref()).unwrap().images().map(|image| image.unwrap()).collect();
    // One unit, and no second derivative: the kernel with the fix-up that follows it.
    let entries: Vec<&str> =
        images.iter().flat_map(|image| &image.image.symbols).map(|(entry, _)| entry.as_str()).collect();
    assert_eq!((images.len(), entries), (1, vec!["forward", "fixup_forward"]));

    // For a model that cannot run no bundle is written.
    fs::remove_file(&out).unwrap();
    fs::write(&file, model(&payload, 8)).unwrap();
    let told = bad(&["compile", &file, "--arch", "sm_90", "--out", &out]);
    assert!(told.contains("conv_forward") && told.contains("not written"), "{told}");
    assert!(!Path::new(&out).exists());
}

#[test]
fn bundles_are_listed_verified_and_merged() {
    let tree = Tree::new("merge");
    let mut files = Vec::new();
    for (name, mark) in [("one", "first"), ("two", "second")] {
        let (file, out) = (tree.path(&format!("{name}.json")), tree.path(&format!("{name}.oeqb")));
        fs::write(&file, PayloadSpec { mark, ..PayloadSpec::default() }.json()).unwrap();
        good(&["compile", &file, "--arch", "sm_90a", "--out", &out]);
        files.push(out);
    }
    let merged = tree.path("merged.oeqb");
    good(&["bundle", "merge", &files[0], &files[1], &files[0], "--out", &merged]);
    let bundle = Bundle::open(merged.as_ref()).unwrap();
    let all = files.iter().flat_map(|file| keys(&Bundle::open(file.as_ref()).unwrap())).collect::<BTreeSet<Key>>();
    assert_eq!(keys(&bundle), all);

    let listed: serde_json::Value = serde_json::from_str(&good(&["--json", "bundle", "list", &merged])).unwrap();
    let units = listed[0]["units"].as_array().unwrap();
    assert_eq!(units.len(), all.len());
    assert!(units.iter().all(|unit| unit["target"] == "sm_90a" && unit["kind"] == "cubin"), "{listed}");
    assert!(good(&["bundle", "list", &merged]).contains("sm_90a"));
    assert!(good(&["bundle", "verify", &files[0], &merged]).contains("whole"));

    let mut bytes = fs::read(&merged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&merged, &bytes).unwrap();
    assert!(bad(&["bundle", "verify", &merged]).contains("digest"));
    assert!(bad(&["bundle", "merge", &merged, "--out", &tree.path("no.oeqb")]).contains("digest"));
    assert!(!Path::new(&tree.path("no.oeqb")).exists());
    fs::write(&merged, &bytes[..bytes.len() / 2]).unwrap();
    assert!(bad(&["bundle", "verify", &merged]).contains("truncated"));
    assert!(bad(&["bundle", "list", &tree.path("one.json")]).contains("not a bundle"));
}

#[test]
fn a_newer_device_gets_ptx_in_the_bundle_and_an_impossible_one_an_error() {
    let tree = Tree::new("newer");
    let (file, out) = (tree.path("payload.json"), tree.path("newer.oeqb"));
    fs::write(&file, PayloadSpec { mark: "newer", ..PayloadSpec::default() }.json()).unwrap();
    good(&["compile", &file, "--arch", "sm_990", "--out", &out]);
    for image in Bundle::open(out.as_ref()).unwrap().images() {
        let image = image.unwrap();
        assert_eq!((image.image.kind(), image.target.as_str()), (ImageKind::Ptx, "sm_990"));
        assert_eq!(image.image.code.last(), Some(&0));
    }
    let old = tree.path("old.oeqb");
    let told = bad(&["compile", &file, "--arch", "sm_30", "--out", &old]);
    assert!(told.contains("sm_30") && told.contains("NVRTC 1") && told.contains("not written"), "{told}");
    assert!(!Path::new(&old).exists());
}
