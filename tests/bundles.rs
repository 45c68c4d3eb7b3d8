//! Bundles, export and progress through the C surface, on the stand-in device and compiler.
//!
//! The runtime is one per process, so each part runs in a process of its own: this program again, for one test, with
//! `OEQ_TEST_CHILD` telling that test that it is the child.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on should stop")]

mod common;

use std::env;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::Mutex;

use common::*;
use oeq_native::capi::{
    FfiProgress, FfiStats, oeq_export_compiled, oeq_free_bytes, oeq_get_stats, oeq_last_error, oeq_load_bundle,
    oeq_load_bundle_bytes, oeq_set_logger, oeq_set_progress,
};
use oeq_native::compile::Bundle;

const MARK: &str = "bundled";

fn role() -> Option<String> {
    env::var("OEQ_TEST_CHILD").ok()
}

fn tree() -> PathBuf {
    PathBuf::from(env::var_os("OEQ_TEST_TREE").unwrap())
}

fn child(test: &str, role: &str, tree: &Path, variables: &[(&str, &str)]) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env("OEQ_TEST_CHILD", role).env("OEQ_TEST_TREE", tree).envs(variables.iter().copied());
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{test} as {role}: {}\n{told}", output.status);
    assert!(told.contains("1 passed"), "{test} as {role} ran no test\n{told}");
}

/// A call of one derivative order, run to its end.
fn run(mark: &str, target: &str) -> Answer {
    let payload = PayloadSpec { mark, ..PayloadSpec::default() }.json();
    let (l1, l2, l3) = (f32s(0x1000, &[5, L1]), f32s(0x2000, &[5, L2]), f32s(0x4000, &[5, L3]));
    let weights = f32s(0x3000, &[5, W]);
    let (operands, results) = match target {
        "tp_forward" => (vec![l1, l2, weights], vec![l3]),
        _ => (vec![l1.clone(), l2.clone(), weights.clone(), l3], vec![l1, l2, weights]),
    };
    Site::new(3, &payload, 1).with(operands, results).run(target)
}

fn stats() -> FfiStats {
    // SAFETY: all bits of the structure may be zero, and its size is set before the call.
    unsafe {
        let mut stats: FfiStats = std::mem::zeroed();
        stats.struct_size = size_of::<FfiStats>() as u64;
        assert_eq!(oeq_get_stats(&raw mut stats), 0);
        stats
    }
}

fn last_error() -> String {
    // SAFETY: never null, and NUL-terminated.
    unsafe { CStr::from_ptr(oeq_last_error()) }.to_str().unwrap().to_owned()
}

fn load(path: &Path) -> i32 {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: NUL-terminated.
    unsafe { oeq_load_bundle(path.as_ptr()) }
}

fn export() -> Vec<u8> {
    let (mut bytes, mut size) = (ptr::null_mut(), 0);
    // SAFETY: two valid pointers; what they are given is read and given back once.
    unsafe {
        assert_eq!(oeq_export_compiled(&raw mut bytes, &raw mut size), 0);
        let copy = std::slice::from_raw_parts(bytes, size).to_vec();
        oeq_free_bytes(bytes, size);
        copy
    }
}

/// In a process whose compiler fails whatever it is given of the test's payload.
fn without_compiler() -> &'static World {
    let world = world();
    world.failing.lock().unwrap().push(MARK.to_owned());
    world
}

#[test]
fn what_one_process_compiled_serves_others_without_a_compiler() {
    const TEST: &str = "what_one_process_compiled_serves_others_without_a_compiler";
    let sm_90 = ARCHITECTURES[0];
    match role().as_deref() {
        None => {
            let tree = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("bundles-{}", std::process::id()));
            fs::create_dir_all(&tree).unwrap();
            let list = format!("{0}/empty.oeqb::{0}/k.oeqb", tree.display());
            fs::write(tree.join("empty.oeqb"), oeq_native::compile::bundle::Builder::default().build()).unwrap();
            child(TEST, "compile", &tree, &[]);
            for role in ["path", "memory", "late"] {
                child(TEST, role, &tree, &[]);
            }
            child(TEST, "variable", &tree, &[("OEQ_BUNDLE", &list)]);
            child(TEST, "missing", &tree, &[("OEQ_BUNDLE", "/nonesuch.oeqb")]);
            child(TEST, "damaged", &tree, &[]);
            fs::remove_dir_all(tree).unwrap();
        }
        Some("compile") => {
            let world = world();
            run(MARK, "tp_forward").unwrap();
            run(MARK, "tp_backward").unwrap();
            let bytes = export();
            let bundle = Bundle::from_bytes("exported", bytes.clone()).unwrap();
            bundle.verify().unwrap();
            // Two units, each for both architectures of the stand-in device.
            assert_eq!((bundle.len(), world.compilations(MARK, sm_90)), (4, 2));
            assert!(bundle.images().all(|image| image.unwrap().family == "tensor_product"));
            fs::write(tree().join("k.oeqb"), bytes).unwrap();
        }
        Some("damaged") => {
            let world = world();
            let mut bytes = fs::read(tree().join("k.oeqb")).unwrap();
            // A reader that knows nothing of the file finds it damaged in the directory; damage in an image only
            // costs that image.
            *bytes.last_mut().unwrap() ^= 1;
            // SAFETY: a valid buffer.
            assert_eq!(unsafe { oeq_load_bundle_bytes(bytes.as_ptr(), bytes.len()) }, 0);
            bytes[20] ^= 1;
            // SAFETY: a valid buffer.
            assert_eq!(unsafe { oeq_load_bundle_bytes(bytes.as_ptr(), bytes.len()) }, 3);
            assert!(last_error().contains("digest"), "{}", last_error());
            run(MARK, "tp_forward").unwrap();
            run(MARK, "tp_backward").unwrap();
            export(); // Waits for everything.
            let compiled = ARCHITECTURES.iter().map(|a| world.compilations(MARK, *a)).sum::<usize>();
            assert_eq!((compiled, stats().bundle_hits, stats().compiled), (1, 3, 1));
        }
        Some("missing") => {
            world();
            let (_, text) = run(MARK, "tp_forward").unwrap_err();
            assert!(text.contains("OEQ_BUNDLE") && text.contains("/nonesuch.oeqb"), "{text}");
        }
        Some(role) => {
            let file = tree().join("k.oeqb");
            match role {
                "path" => {
                    // Before the runtime is there.
                    assert_eq!(load(&file), 0);
                    assert_eq!(load(Path::new("/nonesuch.oeqb")), 5);
                    assert!(last_error().contains("/nonesuch.oeqb"), "{}", last_error());
                    without_compiler();
                }
                "memory" => {
                    let mut bytes = fs::read(&file).unwrap();
                    // SAFETY: a valid buffer.
                    assert_eq!(unsafe { oeq_load_bundle_bytes(bytes.as_ptr(), bytes.len()) }, 0);
                    // They were copied.
                    bytes.fill(0);
                    without_compiler();
                }
                "late" => {
                    without_compiler();
                    assert!(run(MARK, "tp_forward").is_err());
                    assert_eq!(load(&file), 0);
                }
                _ => drop(without_compiler().failing.lock().unwrap()),
            }
            run(MARK, "tp_forward").unwrap();
            run(MARK, "tp_backward").unwrap();
            let stats = stats();
            assert!(stats.bundle_hits >= 2 && stats.compiled == 0, "{stats:?}");
            assert_eq!(stats.failed > 0, role == "late");
            // What came from a bundle is passed on too.
            assert_eq!(export(), fs::read(file).unwrap());
        }
    }
}

static EVENTS: Mutex<Vec<(String, i32, f64)>> = Mutex::new(Vec::new());
static LINES: Mutex<Vec<(i32, String)>> = Mutex::new(Vec::new());

extern "C" fn on_progress(progress: *const FfiProgress, user: *mut c_void) {
    assert_eq!(user as usize, 77);
    // SAFETY: the library passes a valid structure with a NUL-terminated text.
    let (progress, unit) = unsafe { (&*progress, CStr::from_ptr((*progress).unit)) };
    assert!(progress.done <= progress.total && progress.struct_size == size_of::<FfiProgress>() as u64);
    EVENTS.lock().unwrap().push((unit.to_str().unwrap().to_owned(), progress.step, progress.seconds));
}

extern "C" fn on_line(level: i32, line: *const c_char, user: *mut c_void) {
    assert_eq!(user as usize, 78);
    // SAFETY: the library passes a NUL-terminated text.
    LINES.lock().unwrap().push((level, unsafe { CStr::from_ptr(line) }.to_str().unwrap().to_owned()));
}

#[test]
fn every_step_of_a_unit_is_told_to_the_callback_and_the_logger() {
    const TEST: &str = "every_step_of_a_unit_is_told_to_the_callback_and_the_logger";
    let Some(role) = role() else {
        let tree = Path::new(env!("CARGO_TARGET_TMPDIR"));
        child(TEST, "info", tree, &[("OEQ_LOG", "info")]);
        child(TEST, "default", tree, &[]);
        return child(TEST, "bad", tree, &[("OEQ_LOG", "loud")]);
    };
    if role == "bad" {
        assert_eq!(oeq_set_logger(Some(on_line), 78 as *mut c_void), 3);
        assert!(last_error().contains("OEQ_LOG") && last_error().contains("loud"), "{}", last_error());
        return;
    }
    assert_eq!(oeq_set_progress(Some(on_progress), 77 as *mut c_void), 0);
    assert_eq!(oeq_set_logger(Some(on_line), 78 as *mut c_void), 0);
    let world = world();
    run("told", "tp_forward").unwrap();
    world.failing.lock().unwrap().push("fails".to_owned());
    assert!(run("fails", "tp_forward").is_err());
    export();
    let unit = "tensor_product/forward for sm_90";
    let steps: Vec<i32> = EVENTS.lock().unwrap().iter().filter(|event| event.0 == unit).map(|event| event.1).collect();
    // Queued, compiling, compiled; queued, compiling, failed.
    assert_eq!(steps, [0, 1, 3, 0, 1, 6]);
    let lines = LINES.lock().unwrap().clone();
    let has = |level: i32, words: &str| {
        lines.iter().any(|(l, line)| *l == level && line.contains(unit) && line.contains(words))
    };
    assert!(has(2, "failed after"), "{lines:?}");
    assert_eq!(has(3, "compiled"), role == "info", "{lines:?}");
    assert!(lines.iter().all(|(level, _)| *level <= 3), "{lines:?}");

    // Ended, neither hears more.
    assert_eq!((oeq_set_progress(None, ptr::null_mut()), oeq_set_logger(None, ptr::null_mut())), (0, 0));
    let before = (EVENTS.lock().unwrap().len(), LINES.lock().unwrap().len());
    run("silent", "tp_forward").unwrap();
    export();
    assert_eq!((EVENTS.lock().unwrap().len(), LINES.lock().unwrap().len()), before);
}
