//! Marks the shared library as one that is never unloaded: its compiler threads and the state deleters that XLA holds run
//! its code, and a host that closes its handle must not take that away.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
