//! Registers every target in a PJRT plugin and tells how it went.
//!
//! usage: `register_plugin PLUGIN.so [PLATFORM]` (CUDA by default)

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that tells something")]

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use oeq_native::{Platform, Plugin};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: register_plugin PLUGIN.so [PLATFORM]")?;
    let platform = Platform::parse(arguments.next().as_deref().unwrap_or("CUDA"))?;

    let begun = Instant::now();
    // SAFETY: loading a plugin runs its initialisers, which is what we came for.
    let library = unsafe { libloading::Library::new(&path)? };
    // SAFETY: the function that every PJRT plugin exports; it takes nothing and answers its static table.
    let api =
        unsafe { library.get::<unsafe extern "C" fn() -> *const oeq_native::xla::pjrt::PjrtApi>(b"GetPjrtApi")?() };
    let opened = begun.elapsed();
    // SAFETY: the plugin's answer; the library is never closed.
    let plugin = unsafe { Plugin::from_raw(api)? };
    let begun = Instant::now();
    let report = plugin.register(platform)?;
    let registered = begun.elapsed();
    std::mem::forget(library);

    let (major, minor) = plugin.version();
    println!("plugin    {path}, PJRT C API {major}.{minor}");
    let version = report.api_minor.map_or("not shown".to_owned(), |minor| format!("0.{minor}"));
    println!("door      {}, XLA FFI api {version}, platform {}", report.door.name(), report.platform.name());
    for (target, outcome) in &report.targets {
        println!("  {target:<24} {outcome}");
    }
    println!(
        "time      {:.1} ms to load the plugin, {:.2} ms to register",
        opened.as_secs_f64() * 1e3,
        registered.as_secs_f64() * 1e3
    );
    Ok(report.check()?)
}
