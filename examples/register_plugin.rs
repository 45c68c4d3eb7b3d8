//! Registers every target in a PJRT plugin and tells how it went.
//!
//! usage: `register_plugin PLUGIN.so [PLATFORM]` (CUDA by default)

#![allow(clippy::print_stdout, reason = "a program that tells something")]

use std::error::Error;
use std::time::Instant;

use oeq_native::Platform;

fn main() -> Result<(), Box<dyn Error>> {
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
    let begun = Instant::now();
    // SAFETY: the plugin's answer; the library is never closed.
    let api = unsafe { oeq_native::xla::pjrt::ffi_api(api)? };
    oeq_native::register_ffi(api, platform)?;
    let registered = begun.elapsed();
    std::mem::forget(library);

    println!("plugin    {path}");
    println!("door      FFI api, XLA FFI api 0.{}, platform {}", api.minor(), platform.name());
    for entry in &oeq_native::registry::table()?.entries {
        println!("  {:<24} registered", entry.descriptor.name);
    }
    println!(
        "time      {:.1} ms to load the plugin, {:.2} ms to register",
        opened.as_secs_f64() * 1e3,
        registered.as_secs_f64() * 1e3
    );
    Ok(())
}
