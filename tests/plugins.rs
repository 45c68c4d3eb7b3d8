//! Registration in real PJRT plugins, through every door that each has. `tests/hosts/run.sh` downloads them and runs
//! this; `OEQ_TEST_PLUGINS` names the list that `tests/hosts/plugins.sh` prints. Every case gets a process of its own,
//! since what was registered stays.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::undocumented_unsafe_blocks,
    reason = "a failed test should panic; the table is the point"
)]

mod common;
#[allow(dead_code, unreachable_pub, reason = "the native host's, of which a test needs a part")]
#[path = "../examples/native_host/pjrt.rs"]
mod pjrt;

use std::ffi::{CStr, CString};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use oeq_native::xla::ffi;
use oeq_native::xla::pjrt::PjrtApi;
use oeq_native::xla::register::{Door, Outcome, Report};
use oeq_native::{Code, Platform, Plugin, capi, registry};

const DOORS: [Door; 3] = [Door::Api, Door::GpuExtension, Door::ExecuteOnly];

struct Case {
    name: String,
    platform: String,
    path: String,
}

fn cases() -> Vec<Case> {
    let list = std::env::var("OEQ_TEST_PLUGINS").expect("OEQ_TEST_PLUGINS names the list of plugins");
    let list = std::fs::read_to_string(list).unwrap();
    list.lines()
        .map(|line| {
            let [name, platform, path] = line.split_whitespace().collect::<Vec<_>>().try_into().unwrap();
            Case { name: name.into(), platform: platform.into(), path: path.into() }
        })
        .collect()
}

fn open(path: &str) -> *const PjrtApi {
    let library = ManuallyDrop::new(unsafe { libloading::Library::new(path) }.unwrap());
    unsafe { library.get::<unsafe extern "C" fn() -> *const PjrtApi>(b"GetPjrtApi").unwrap()() }
}

/// Runs this test program once more, for one case; answers what it says after `RESULT `.
fn in_a_process(arguments: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_case", "--include-ignored", "--nocapture", "--test-threads", "1"])
        .env("OEQ_TEST_CASE", arguments)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments}:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text.lines().find_map(|line| line.split_once("RESULT ")).unwrap_or_else(|| panic!("{text}")).1.to_owned()
}

#[test]
#[ignore = "needs plugins, see tests/hosts/run.sh"]
fn every_plugin_through_every_door() {
    let cases = cases();
    println!("{:<36} {:<10} {:<26} result", "plugin", "FFI api", "door");
    for case in &cases {
        let mut found = Vec::new();
        for door in DOORS.iter().map(|door| *door as u32).chain([0]) {
            let result = in_a_process(&format!("{door} {} {}", case.platform, case.path));
            let [api, door_name, outcome] = result.split(" | ").collect::<Vec<_>>().try_into().unwrap();
            let mark = if door == 0 { "best: " } else { "" };
            println!("{:<36} {api:<10} {:<26} {outcome}", case.name, format!("{mark}{door_name}"));
            found.push((door, door_name.to_owned(), outcome.to_owned()));
        }
        // The best is the first that works, and it takes all targets.
        let works = |outcome: &str| outcome.starts_with("8 registered");
        let first = found.iter().find(|(door, _, outcome)| *door != 0 && works(outcome)).expect("some door works");
        let best = found.last().unwrap();
        assert!(works(&best.2) && best.1 == first.1, "{}: {best:?} is not {first:?}", case.name);
    }
}

#[test]
#[ignore = "needs plugins, see tests/hosts/run.sh"]
fn two_runtimes_in_one_process_do_not_disturb_each_other() {
    let cases = cases();
    // The last of each that shows its api: of different versions, if the list has such.
    let of = |start: &str| {
        let last = cases.iter().rfind(|case| case.platform == start || case.name.starts_with(start));
        last.unwrap_or_else(|| panic!("no plugin {start}"))
    };
    println!("{}", in_a_process(&format!("two {} {}", of("cpu").path, of("jax-cuda13").path)));
}

#[test]
#[ignore = "needs plugins, see tests/hosts/run.sh"]
fn a_compiler_finds_handlers_that_came_before_or_after_its_client() {
    for case in cases().iter().filter(|case| case.platform == "cpu") {
        for order in ["before", "after"] {
            for handlers in ["CUDA", "Host"] {
                let found = in_a_process(&format!("{order} {handlers} {}", case.path));
                println!("{}, {handlers} handlers, registered {order} the client: {found}", case.name);
            }
        }
    }
}

/// One case, in a process of its own.
#[test]
#[ignore = "run by the others"]
fn one_case() {
    let Ok(case) = std::env::var("OEQ_TEST_CASE") else { return };
    let [kind, first, second] = case.split_whitespace().collect::<Vec<_>>().try_into().unwrap();
    match kind {
        "two" => two(first, second),
        "before" | "after" => compiled(kind == "after", Platform::parse(first).unwrap(), second),
        door => one(door.parse().unwrap(), first, second),
    }
}

fn all(report: &Report, outcome: &Outcome) -> bool {
    report.targets.len() == 8 && report.targets.iter().all(|(_, found)| found == outcome)
}

fn one(door: u32, platform: &str, path: &str) {
    let raw = open(path);
    let plugin = unsafe { Plugin::from_raw(raw) }.unwrap();
    let platform_name = CString::new(platform).unwrap();
    let platform = Platform::parse(platform).unwrap();
    let api = plugin.ffi_api();
    let shown = api.as_ref().map_or("not shown".to_owned(), |api| format!("0.{}", api.minor()));
    let wanted = DOORS.into_iter().find(|known| *known as u32 == door);

    // A platform that does not exist registers nothing.
    assert_eq!(unsafe { capi::oeq_register_pjrt(raw, c"CUDDA".as_ptr()) }, Code::InvalidArgument as i32);

    let begun = Instant::now();
    let report = match wanted {
        Some(door) => plugin.register_by(door, platform),
        None => plugin.register(platform),
    };
    let time = begun.elapsed();
    let report = match report {
        Ok(report) => report,
        Err(error) => {
            assert_eq!(error.code(), Code::Unimplemented, "{error}");
            let name = wanted.map_or("none", Door::name);
            println!("RESULT {shown} | {name} | no such door: {}", error.message());
            return;
        }
    };
    assert!(all(&report, &Outcome::Registered), "{report:?}");
    let name = report.door.name();

    // Again, from several threads at once.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let again = plugin.register_by(report.door, platform).unwrap();
                assert!(all(&again, &Outcome::AlreadyThere), "{again:?}");
            });
        }
    });
    let mut proof = "";
    if let Ok(api) = api {
        // What XLA holds now is shown by what it refuses: the same name with one function less or more.
        for entry in &registry::table().unwrap().entries {
            let target = entry.descriptor;
            let whole = target.bundle_on(platform).unwrap();
            let execute = target.stateless_on(platform).unwrap();
            let same = match report.door {
                Door::ExecuteOnly => {
                    ffi::HandlerBundle { instantiate: None, prepare: None, initialize: None, execute: Some(execute) }
                }
                _ => whole,
            };
            api.register_handler(target.name, platform.name(), same, target.traits).unwrap();
            let other = ffi::HandlerBundle { initialize: same.execute, ..same };
            let other = ffi::HandlerBundle { instantiate: same.instantiate.xor(whole.instantiate), ..other };
            let error = api.register_handler(target.name, platform.name(), other, target.traits).unwrap_err();
            assert!(error.message().contains("different bundle"), "{error}");
        }
        proof = ", all held whole";
        if report.door == Door::ExecuteOnly {
            proof = ", execute alone held";
            // The whole bundles now meet the lone functions, and every target says so.
            let late = plugin.register_by(Door::Api, platform).unwrap();
            assert!(late.targets.iter().all(|(_, outcome)| matches!(outcome, Outcome::Refused(_))), "{late:?}");
            assert_ne!(unsafe { capi::oeq_register_pjrt(raw, platform_name.as_ptr()) }, 0);
        } else {
            assert_eq!(unsafe { capi::oeq_register_pjrt(raw, platform_name.as_ptr()) }, 0);
            // Another door leads to the same XLA.
            let again = plugin.register(platform).unwrap();
            assert!(all(&again, &Outcome::AlreadyThere), "{again:?}");
        }
        wrong_version(api);
    }
    println!(
        "RESULT {shown} | {name} | 8 registered, then 8 already there{proof} ({:.0} us)",
        time.as_secs_f64() * 1e6
    );
}

/// A handler that was made for a version to come is refused, with both versions in the text.
fn wrong_version(api: oeq_native::xla::api::Api) {
    unsafe extern "C" fn future(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
        let metadata = unsafe { (*(*frame).extension_start.cast::<ffi::MetadataExtension>()).metadata };
        unsafe { (*metadata).api_version.minor_version = 77 };
        std::ptr::null_mut()
    }
    let bundle = ffi::HandlerBundle { instantiate: None, prepare: None, initialize: None, execute: Some(future) };
    let error = api.register_handler("oeq_native.of_the_future", "CUDA", bundle, 0).unwrap_err();
    assert!(error.message().contains("0.77") && error.message().contains("API version"), "{error}");
}

/// A call of a tensor product with this payload.
fn module(payload: &str) -> String {
    let payload = payload.replace('\\', "\\5C").replace('"', "\\22").replace('\n', "\\0A");
    let types = "(tensor<5x6xf32>, tensor<5x4xf32>, tensor<5x8xf32>)";
    format!(
        "module @call {{ func.func public @main(%a: tensor<5x6xf32>, %b: tensor<5x4xf32>, %c: tensor<5x8xf32>) -> \
         tensor<5x10xf32> {{ %0 = stablehlo.custom_call @tp_forward(%a, %b, %c) {{mhlo.backend_config = {{hash = 7 : \
         i64, kernel = \"{payload}\"}}}} : {types} -> tensor<5x10xf32> return %0 : tensor<5x10xf32> }} }}"
    )
}

/// XLA's CPU compiler meets our targets, whole bundles: those of the host, or those of CUDA under the host's name,
/// which live their lives up to the driver.
fn compiled(late: bool, handlers: Platform, path: &str) {
    let plugin = pjrt::Plugin::open(Path::new(path)).unwrap();
    let registry = unsafe { Plugin::from_raw(plugin.api().cast()) }.unwrap();
    let register = || {
        if handlers == Platform::Host {
            return registry.register(Platform::Host).unwrap().check().unwrap();
        }
        let api = registry.ffi_api().unwrap();
        oeq_native::xla::types::id_in(api).unwrap();
        for entry in &registry::table().unwrap().entries {
            let target = entry.descriptor;
            let bundle = target.bundle_on(handlers).unwrap();
            api.register_handler(target.name, Platform::Host.name(), bundle, target.traits).unwrap();
        }
    };
    let refusal = |client: &pjrt::Client, payload: &str| {
        client.compile(module(payload).as_bytes()).err().expect("no call to compile").to_string()
    };
    let payload = common::PayloadSpec { mark: "met by a compiler", ..common::PayloadSpec::default() }.json();
    if !late {
        register();
    }
    plugin.initialize().unwrap();
    let client = pjrt::Client::new(plugin, &[]).unwrap();
    if late {
        // Without us the compiler does not know the name: what is found below is found by the registration.
        let text = refusal(&client, &payload);
        assert!(text.contains("tp_forward") && text.contains("Host"), "{text}");
        register();
    }
    let executable = client.compile(module(&payload).as_bytes()).unwrap();
    // Once more with a client there, and the name is still found; what is wrong with a payload is told whole.
    register();
    let text = refusal(&client, "{\"kernel\": \"none\"}");
    assert!(text.starts_with("oeq-native: tp_forward, instantiate: ") && text.contains("`forward_config`"), "{text}");
    drop(client.compile(module(&payload.replace("compiler", "second compiler")).as_bytes()).unwrap());
    if handlers == Platform::Host {
        // The payload is for being compiled; tests/hosts/run.sh and tests/host run real ones.
        println!("RESULT compiled");
        return;
    }
    let upload = |columns: i64| {
        let data: Vec<u8> = (0..5 * columns).flat_map(|_| 1.0_f32.to_le_bytes()).collect();
        client.upload(11, &[5, columns], &data).unwrap()
    };
    let inputs = pjrt::Inputs::new([common::L1, common::L2, common::W].map(upload).into());
    let mut texts = (0..3).map(|_| executable.run(&inputs).err().expect("CUDA handlers do not run here").to_string());
    let text = texts.next().unwrap();
    assert!(texts.all(|other| other == text), "{text}");
    let rest = text.strip_prefix("oeq-native: tp_forward, execute: ").unwrap_or_else(|| panic!("{text}"));
    // Whole, from the first word to the last: without a driver, or with one and no stream of it.
    let absent = rest.starts_with("no CUDA driver on this machine: ")
        && rest.ends_with("(the driver is installed with the GPU; a CUDA toolkit is not needed)");
    let elsewhere = rest.starts_with("this target runs on CUDA, and XLA has no GPU stream for this call (");
    assert!(absent || elsewhere && rest.ends_with(')'), "{text}");
    println!("RESULT compiled, and run as far as: {text}");
}

fn two(first: &str, second: &str) {
    let raws = [open(first), open(second)];
    let plugins = raws.map(|raw| unsafe { Plugin::from_raw(raw) }.unwrap());
    let apis = plugins.map(|plugin| plugin.ffi_api().unwrap());
    assert_ne!(apis[0].address(), apis[1].address());
    // Both at once, and each again after the other.
    std::thread::scope(|scope| {
        for raw in raws.map(|raw| raw as usize) {
            for _ in 0..3 {
                scope.spawn(move || {
                    let status = unsafe { capi::oeq_register_pjrt(raw as *const PjrtApi, c"CUDA".as_ptr()) };
                    let text = unsafe { CStr::from_ptr(capi::oeq_last_error()) };
                    assert_eq!(status, 0, "{text:?}");
                });
            }
        }
    });
    let ids = apis.map(|api| oeq_native::xla::types::id_in(api).unwrap().type_id);
    for plugin in plugins {
        assert!(all(&plugin.register(Platform::Cuda).unwrap(), &Outcome::AlreadyThere));
        assert!(all(&plugin.register(Platform::Host).unwrap(), &Outcome::Registered));
    }
    assert_eq!(ids, apis.map(|api| oeq_native::xla::types::id_in(api).unwrap().type_id));
    println!("RESULT FFI apis 0.{} and 0.{} side by side, state types {ids:?}", apis[0].minor(), apis[1].minor());
}
