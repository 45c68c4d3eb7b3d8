//! Compiling with a real NVRTC, on any machine: no GPU and no driver are needed.
//!
//! `OEQ_TEST_NVRTC` names the library or its directory; `tests/run.sh` sets it. Tests that need a process of their own
//! (what is loaded, how a process ends) run this program again for one test, with `OEQ_TEST_CHILD` telling that test
//! that it is the child.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on should stop")]

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, mpsc};

use oeq_native::compile::nvrtc::{Image, ImageKind, Nvrtc, Program};
use oeq_native::compile::pool::Pool;
use oeq_native::compile::{Architecture, Target};
use oeq_native::error::{Code, Result};
use oeq_native::source::entry_points;

const SOURCE: &str = r#"
extern "C" __device__ float third(float x) { return x / 3.0f; }
__global__ void __launch_bounds__(64) forward(unsigned long n, float *x) {
    extern __shared__ char s[];
    float *shared = (float *)s;
    shared[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    if (threadIdx.x < n) atomicAdd(x, third(__shfl_down_sync(0xffffffffu, shared[threadIdx.x], 1)));
}
__global__ void backward(double *x) { x[threadIdx.x] *= 2; }
"#;

/// The directory of the NVRTC to test with.
fn folder() -> PathBuf {
    let Some(path) = env::var_os("OEQ_TEST_NVRTC").map(PathBuf::from) else {
        panic!(
            "set OEQ_TEST_NVRTC to an NVRTC library or its directory, for example \
             <venv>/lib/python3.11/site-packages/nvidia/cu13/lib after `pip install nvidia-cuda-nvrtc`; tests/run.sh does"
        );
    };
    let folder = if path.is_dir() { path.as_path() } else { path.parent().unwrap() };
    fs::canonicalize(folder).unwrap()
}

fn library_file() -> PathBuf {
    ["libnvrtc.so.13", "libnvrtc.so.12"].map(|name| folder().join(name)).into_iter().find(|file| file.exists()).unwrap()
}

fn nvrtc() -> Nvrtc {
    Nvrtc::find(Some(&folder())).unwrap()
}

fn sm_90() -> Architecture {
    "sm_90".parse().unwrap()
}

fn compile(nvrtc: &Nvrtc, source: &str, entry_points: &[&str]) -> Result<Image> {
    nvrtc.compile(&Program { name: "test.cu", source, architecture: sm_90(), entry_points, extra_options: &[] })
}

/// A program of which no two numbers give the same code, big enough to take a while.
fn big_program(number: usize, lines: usize) -> String {
    use std::fmt::Write as _;
    let mut source = String::from("__global__ void forward(float *x) {\n");
    for line in 0..lines {
        writeln!(source, "x[{line}] += x[{}] * {number}.5f - x[{}];", line * 7 % lines, line * 13 % lines).unwrap();
    }
    source + "}\n"
}

/// Runs one test of this program in a process of its own.
fn child(test: &str, role: &str, variables: &[(&str, &Path)]) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "HOME"] {
        command.env_remove(variable);
    }
    command.env("PATH", "").env("OEQ_TEST_CHILD", role).envs(variables.iter().copied());
    command.output().unwrap()
}

fn child_must_succeed(test: &str, role: &str, variables: &[(&str, &Path)]) {
    let output = child(test, role, variables);
    let told = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{test} as {role}: {}\n{told}", output.status);
    assert!(told.contains("1 passed"), "{test} as {role} ran no test\n{told}");
}

fn role() -> Option<String> {
    env::var("OEQ_TEST_CHILD").ok()
}

/// A directory of its own for one test, removed at its end.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("compile-real-{name}-{}", std::process::id()));
        fs::create_dir_all(&root).unwrap();
        Self(root)
    }

    fn folder(&self, below: &str) -> PathBuf {
        let path = self.0.join(below);
        fs::create_dir_all(&path).unwrap();
        path
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

#[test]
fn a_file_a_directory_and_the_folder_above_all_name_the_library() {
    for path in [library_file(), folder(), folder().parent().unwrap().to_owned()] {
        let nvrtc = Nvrtc::find(Some(&path)).unwrap();
        assert!(matches!(nvrtc.version().0, 12 | 13), "{nvrtc:?}");
        assert_eq!(fs::canonicalize(nvrtc.path()).unwrap(), fs::canonicalize(library_file()).unwrap());
        assert!(nvrtc.architectures().contains(&sm_90()) && nvrtc.architectures().is_sorted());
    }
}

#[test]
fn a_program_becomes_machine_code_with_the_names_of_its_kernels() {
    let image = compile(&nvrtc(), SOURCE, &["backward", "forward"]).unwrap();
    assert!(image.code.starts_with(b"\x7fELF"));
    // e_machine of the ELF header: 190 is EM_CUDA.
    assert_eq!(image.code[18..20], [190, 0]);
    let symbols: Vec<_> = image.symbols.iter().map(|(name, lowered)| (name.as_str(), lowered.as_str())).collect();
    assert_eq!(symbols, [("backward", "_Z8backwardPd"), ("forward", "_Z7forwardmPf")]);
    for (_, lowered) in symbols {
        let name = format!(".text.{lowered}\0");
        assert!(image.code.windows(name.len()).any(|bytes| bytes == name.as_bytes()), "no section {name:?}");
    }
    assert_eq!(image.log, "");
}

#[test]
fn a_broken_program_is_told_with_the_whole_log() {
    let nvrtc = nvrtc();
    let error =
        compile(&nvrtc, "__global__ void forward() {\n  int x = nonesuch;\n  also_missing();\n}\n", &["forward"]);
    let error = error.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    let (major, minor) = nvrtc.version();
    let version = format!("NVRTC {major}.{minor}");
    let parts = [
        "\"test.cu\"",
        "sm_90",
        &version,
        nvrtc.path().to_str().unwrap(),
        "test.cu(2): error",
        "nonesuch",
        "test.cu(3): error",
        "also_missing",
        "2 errors detected",
    ];
    for part in parts {
        assert!(error.message().contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn a_program_whose_assembly_fails_is_told_as_well() {
    let error = compile(&nvrtc(), "__global__ void forward() { asm(\"nonesuch;\"); }", &["forward"]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("ptxas") && error.message().contains("nonesuch"), "{error}");
}

#[test]
fn warnings_are_kept_and_a_long_log_is_shortened() {
    let mut source = String::from("__global__ void forward() {\n");
    source.extend((0..2000).map(|number| format!("int a_variable_that_nobody_ever_uses_{number};\n")));
    let image = compile(&nvrtc(), &(source + "}\n"), &["forward"]).unwrap();
    assert!(image.log.len() < (64 << 10) + 100, "{} bytes", image.log.len());
    for part in ["test.cu(2): warning", "bytes left out", "a_variable_that_nobody_ever_uses_1999"] {
        assert!(image.log.contains(part), "{part:?} is not in: {}", image.log);
    }
}

#[test]
fn an_entry_point_that_the_program_lacks_is_named() {
    let error = compile(&nvrtc(), SOURCE, &["forward", "sideways"]).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("sideways"), "{error}");
}

#[test]
fn nul_characters_are_refused_wherever_they_are() {
    let nvrtc = nvrtc();
    let good = Program { name: "a", source: SOURCE, architecture: sm_90(), entry_points: &[], extra_options: &[] };
    let option = ["-D\0".to_owned()];
    let programs = [
        Program { name: "a\0", ..good },
        Program { source: "__global__ void forward() {}\0", ..good },
        Program { entry_points: &["for\0ward"], ..good },
        Program { extra_options: &option, ..good },
    ];
    for program in programs {
        let error = nvrtc.compile(&program).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("NUL character at byte"), "{error}");
    }
}

#[test]
fn an_architecture_that_is_too_old_is_told_with_those_that_are_known() {
    let nvrtc = nvrtc();
    let architecture = Architecture::from_number(30).unwrap();
    let program = Program { name: "a", source: SOURCE, architecture, entry_points: &["forward"], extra_options: &[] };
    let error = nvrtc.compile(&program).unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    let lowest = format!("the lowest it knows is {}", nvrtc.architectures()[0]);
    let (major, minor) = nvrtc.version();
    let version = format!("NVRTC {major}.{minor}");
    for part in ["sm_30", &version, &lowest, "sm_90, ", nvrtc.path().to_str().unwrap(), "older NVRTC", "pip install"] {
        assert!(error.message().contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn a_newer_device_than_the_compiler_knows_gets_ptx_for_the_highest_that_it_knows() {
    let nvrtc = nvrtc();
    let highest = *nvrtc.architectures().last().unwrap();
    for number in [highest.number() + 1, 9990] {
        let architecture = Architecture::from_number(number).unwrap();
        let program =
            Program { name: "a", source: SOURCE, architecture, entry_points: &["forward"], extra_options: &[] };
        let image = nvrtc.compile(&program).unwrap();
        assert_eq!(image.kind(), ImageKind::Ptx);
        let text = std::ffi::CStr::from_bytes_with_nul(&image.code).unwrap().to_str().unwrap();
        assert!(text.contains(&format!(".target {highest}")), "{text}");
        assert_eq!(image.symbols, [("forward".to_owned(), "_Z7forwardmPf".to_owned())]);
        assert!(text.contains(".entry _Z7forwardmPf("), "{text}");
    }
    // One that is known is machine code, as ever.
    let program =
        Program { name: "a", source: SOURCE, architecture: highest, entry_points: &["forward"], extra_options: &[] };
    assert_eq!(nvrtc.compile(&program).unwrap().kind(), ImageKind::Cubin);
}

#[test]
fn a_suffix_reaches_the_compiler_and_its_features_are_there() {
    let nvrtc = nvrtc();
    let target: Target = "sm_90a".parse().unwrap();
    // What only sm_90a defines: https://docs.nvidia.com/cuda/cuda-c-programming-guide, feature-specific macros.
    let source = "#ifndef __CUDA_ARCH_FEAT_SM90_ALL\n#error plain\n#endif\n__global__ void forward() {}";
    let options = target.options();
    let program =
        Program { name: "a", source, architecture: target.base, entry_points: &["forward"], extra_options: &options };
    assert_eq!(nvrtc.compile(&program).unwrap().kind(), ImageKind::Cubin);
    let error = nvrtc.compile(&Program { extra_options: &[], ..program }).unwrap_err();
    assert!(error.message().contains("plain"), "{error}");
    // A suffix that this NVRTC does not know for an architecture is told with its version and path.
    let program =
        Program { architecture: "sm_90".parse().unwrap(), extra_options: &["-arch=sm_90x".to_owned()], ..program };
    let error = nvrtc.compile(&program).unwrap_err();
    let (major, minor) = nvrtc.version();
    for part in ["-arch=sm_90x".to_owned(), format!("NVRTC {major}.{minor}"), nvrtc.path().display().to_string()] {
        assert!(error.message().contains(&part), "{part:?} is not in: {error}");
    }
}

#[test]
fn extra_options_reach_the_compiler() {
    let nvrtc = nvrtc();
    let source = "__global__ void forward(int *x) { *x = FROM_OUTSIDE; }";
    let option = ["-DFROM_OUTSIDE=3".to_owned()];
    let program =
        Program { name: "a", source, architecture: sm_90(), entry_points: &["forward"], extra_options: &option };
    nvrtc.compile(&program).unwrap();
    let error = nvrtc.compile(&Program { extra_options: &[], ..program }).unwrap_err();
    assert!(error.message().contains("FROM_OUTSIDE"), "{error}");
    let bad = ["--nonesuch-option".to_owned()];
    let error = nvrtc.compile(&Program { extra_options: &bad, ..program }).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("--use_fast_math --nonesuch-option"), "{error}");
}

#[test]
fn many_threads_compile_what_one_would() {
    let nvrtc = Arc::new(nvrtc());
    let alone: Vec<Vec<u8>> =
        (0..8).map(|number| compile(&nvrtc, &big_program(number, 60), &["forward"]).unwrap().code).collect();
    let pool = Pool::new(4);
    let (send, done) = mpsc::channel();
    for number in 0..8 {
        let (nvrtc, send) = (Arc::clone(&nvrtc), send.clone());
        let job = move || {
            let image = compile(&nvrtc, &big_program(number, 60), &["forward"]);
            send.send((number, image.unwrap().code)).unwrap();
        };
        assert!(pool.submit(1, Box::new(job)).is_ok());
    }
    drop(send);
    let mut together: Vec<(usize, Vec<u8>)> = done.iter().collect();
    together.sort_unstable();
    assert_eq!(together.len(), 8);
    for (number, code) in together {
        assert!(code == alone[number], "program {number} differs when compiled beside others");
    }
}

#[test]
fn a_worker_has_the_stack_for_deep_nesting() {
    let program = |body: &str| format!("__global__ void forward(int *x) {{ {body} }}");
    // Overflows the 2 MiB that a thread has by default.
    let brackets = program(&format!("*x = {}1{};", "(".repeat(1500), ")".repeat(1500)));
    let nvrtc = Arc::new(nvrtc());
    let pool = Pool::new(1);
    let symbols = |source: &str| {
        let (send, done) = mpsc::channel();
        let (nvrtc, source) = (Arc::clone(&nvrtc), source.to_owned());
        let job = move || send.send(compile(&nvrtc, &source, &["forward"]).map(|image| image.symbols)).unwrap();
        assert!(pool.submit(1, Box::new(job)).is_ok());
        done.recv().unwrap().map(|symbols| symbols.len())
    };
    assert_eq!(symbols(&brackets).unwrap(), 1);
    // As deep as a payload may nest in all other ways.
    for source in [
        program(&format!("*x = {} 1;", "- ".repeat(12_000))),
        program(&format!("*x = {} 1;", "x[0]+".repeat(2400))),
        program(&format!("{} *x = 1;", "if(*x)".repeat(2400))),
        program(&format!("{} *x = 1;", "if(*x == 7) *x = 2; else ".repeat(800))),
        format!("#define D {} 1\n{}", "- ".repeat(12_000), program("*x = - D;")),
    ] {
        assert!(entry_points(&source).is_ok());
        assert_eq!(symbols(&source).unwrap(), 1);
    }
}

#[test]
fn what_the_process_has_loaded_is_taken() {
    const TEST: &str = "what_the_process_has_loaded_is_taken";
    if role().is_none() {
        return child_must_succeed(TEST, "loaded", &[]);
    }
    let loaded = nvrtc();
    let found = Nvrtc::find(None).unwrap();
    assert_eq!(found.path(), loaded.path());
    // An explicit path is never passed over for it.
    let error = Nvrtc::find(Some(Path::new("/nonesuch/libnvrtc.so.13"))).unwrap_err();
    assert!(error.message().contains("/nonesuch/libnvrtc.so.13"), "{error}");
}

#[test]
fn the_wheel_of_a_virtual_environment_is_found() {
    const TEST: &str = "the_wheel_of_a_virtual_environment_is_found";
    if role().is_none() {
        let tree = Tree::new("wheel");
        let packages = tree.folder("lib/python3.11/site-packages/nvidia/cu13");
        symlink(folder(), packages.join("lib")).unwrap();
        return child_must_succeed(TEST, "wheel", &[("VIRTUAL_ENV", &tree.0)]);
    }
    let venv = PathBuf::from(env::var_os("VIRTUAL_ENV").unwrap());
    let found = Nvrtc::find(None).unwrap();
    // A machine with a CUDA of its own finds that first, as it should.
    assert!(found.path().starts_with(&venv) || machine_has_cuda(found.path()), "{found:?}");
    compile(&found, SOURCE, &["forward"]).unwrap();
}

/// Whether a path is one of the machine's, and not one that these tests made or were given.
fn machine_has_cuda(path: &Path) -> bool {
    !path.starts_with(folder()) && !path.starts_with(env!("CARGO_TARGET_TMPDIR"))
}

#[test]
fn where_there_is_none_everything_that_was_tried_is_listed() {
    const TEST: &str = "where_there_is_none_everything_that_was_tried_is_listed";
    if role().is_none() {
        let tree = Tree::new("none");
        tree.folder("lib/python3.11/site-packages");
        return child_must_succeed(TEST, "none", &[("VIRTUAL_ENV", &tree.0)]);
    }
    match Nvrtc::find(None) {
        Ok(found) => assert!(machine_has_cuda(found.path()), "{found:?}"),
        Err(error) => {
            assert_eq!(error.code(), Code::FailedPrecondition);
            let parts = [
                "already loaded in this process",
                "libnvrtc.so.13 (the loader's search)",
                "libnvrtc.so.12 (the loader's search)",
                "libnvrtc.so (the loader's search)",
                "lib/python3.11/site-packages/nvidia/cu13/lib",
                "pip install nvidia-cuda-nvrtc",
                "OEQ_NVRTC",
            ];
            for part in parts {
                assert!(error.message().contains(part), "{part:?} is not in: {error}");
            }
        }
    }
}

#[test]
fn a_library_without_its_companion_is_passed_over_and_told() {
    const TEST: &str = "a_library_without_its_companion_is_passed_over_and_told";
    if role().is_none() {
        let tree = Tree::new("companion");
        let name = library_file().file_name().unwrap().to_owned();
        fs::copy(library_file(), tree.0.join(name)).unwrap();
        return child_must_succeed(TEST, "companion", &[("OEQ_TEST_BROKEN", &tree.0)]);
    }
    let broken = PathBuf::from(env::var_os("OEQ_TEST_BROKEN").unwrap());
    let error = Nvrtc::find(Some(&broken)).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    for part in [broken.to_str().unwrap(), "libnvrtc-builtins.so.1", "pip install --force-reinstall nvidia-cuda-nvrtc"]
    {
        assert!(error.message().contains(part), "{part:?} is not in: {error}");
    }
    // The broken one stays loaded, and does not spoil one that is whole.
    compile(&nvrtc(), SOURCE, &["forward"]).unwrap();
}

#[test]
fn a_symbolic_link_without_the_companion_beside_it_is_enough() {
    const TEST: &str = "a_symbolic_link_without_the_companion_beside_it_is_enough";
    if role().is_none() {
        let tree = Tree::new("link");
        symlink(library_file(), tree.0.join(library_file().file_name().unwrap())).unwrap();
        return child_must_succeed(TEST, "link", &[("OEQ_TEST_LINK", &tree.0)]);
    }
    let link = PathBuf::from(env::var_os("OEQ_TEST_LINK").unwrap());
    compile(&Nvrtc::find(Some(&link)).unwrap(), SOURCE, &["forward"]).unwrap();
}

#[test]
fn a_version_that_is_too_old_is_told_and_a_newer_one_beside_it_taken() {
    let tree = Tree::new("old");
    let source = tree.0.join("old.c");
    let functions = [
        "GetErrorString",
        "GetNumSupportedArchs",
        "GetSupportedArchs",
        "CreateProgram",
        "DestroyProgram",
        "AddNameExpression",
        "CompileProgram",
        "GetProgramLogSize",
        "GetProgramLog",
        "GetCUBINSize",
        "GetCUBIN",
        "GetPTXSize",
        "GetPTX",
        "GetLoweredName",
    ];
    let mut text = String::from("int nvrtcVersion(int *major, int *minor) { *major = 11; *minor = 8; return 0; }\n");
    text.extend(functions.map(|name| format!("int nvrtc{name}(void) {{ return 11; }}\n")));
    fs::write(&source, text).unwrap();
    let old = tree.0.join("libnvrtc.so.14");
    let status = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&old).arg(&source).status().unwrap();
    assert!(status.success());

    let error = Nvrtc::find(Some(&old)).unwrap_err();
    assert!(error.message().contains("NVRTC 11.8, which is too old: needed is 12 or 13"), "{error}");

    // Its name, a lie, puts it before the real one.
    let real = library_file();
    symlink(&real, tree.0.join(real.file_name().unwrap())).unwrap();
    let found = Nvrtc::find(Some(&tree.0)).unwrap();
    assert_eq!(fs::canonicalize(found.path()).unwrap(), fs::canonicalize(real).unwrap());
}

#[test]
fn a_process_may_end_while_it_compiles() {
    const TEST: &str = "a_process_may_end_while_it_compiles";
    if role().is_none() {
        // Without the wait at exit about every third of these died of a segmentation fault.
        for _ in 0..4 {
            let output = child(TEST, "exit", &[]);
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(7), "{}\n{text}", output.status);
        }
        return;
    }
    let nvrtc = Arc::new(nvrtc());
    let pool = Pool::new(3);
    let (send, done) = mpsc::channel();
    for number in 0..30 {
        let (nvrtc, send) = (Arc::clone(&nvrtc), send.clone());
        let job = move || {
            // A short one first, to find the others at work; all but the running ones are refused once exit began.
            let lines = if number == 0 { 60 } else { 300 };
            let _ = compile(&nvrtc, &big_program(number, lines), &["forward"]);
            let _ = send.send(());
        };
        assert!(pool.submit(1, Box::new(job)).is_ok());
    }
    done.recv().unwrap();
    std::process::exit(7);
}

#[test]
fn a_forked_child_compiles_on_threads_of_its_own() {
    const TEST: &str = "a_forked_child_compiles_on_threads_of_its_own";
    if role().is_none() {
        return child_must_succeed(TEST, "fork", &[]);
    }
    let nvrtc = Arc::new(nvrtc());
    let pool = Pool::new(1);
    let (report, begun) = mpsc::channel();
    let (end, told) = mpsc::channel::<()>();
    let blocker = move || {
        report.send(()).unwrap();
        told.recv().unwrap();
    };
    assert!(pool.submit(1, Box::new(blocker)).is_ok());
    begun.recv().unwrap();

    // SAFETY: the only other threads are the harness's, which waits, and the worker, which waits on a channel: neither
    // holds a lock that the child could need.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // The parent's only worker is occupied and does not exist here; a job that runs is run by a new one.
        let (send, done) = mpsc::channel();
        let job = move || send.send(compile(&nvrtc, SOURCE, &["forward"]).is_ok()).unwrap();
        let compiled = pool.submit(1, Box::new(job)).is_ok() && done.recv() == Ok(true);
        std::process::exit(if compiled { 5 } else { 6 });
    }
    let mut status = 0;
    // SAFETY: the child is ours and `status` a valid pointer to int.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status), "status {status}");
    assert_eq!(libc::WEXITSTATUS(status), 5);
    end.send(()).unwrap();
}
