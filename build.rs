//! Link arguments of the shared library.
//!
//! It is never unloaded: its compiler threads and the state deleters that XLA holds run its code, and a host that closes its
//! handle must not take that away. And it shows every target's execute function under the target's plain name, for hosts
//! that take a library and a symbol per target; the static library does not, where such names would meet others'.

use std::fmt::Write as _;
use std::path::Path;

/// Sorted, as in the handler table; a unit test in `src/xla/stateless.rs` compares.
const PLAIN_NAMES: [&str; 8] = [
    "conv_backward",
    "conv_double_backward",
    "conv_forward",
    "oeq_convolution",
    "oeq_tensor_product",
    "tp_backward",
    "tp_double_backward",
    "tp_forward",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return Ok(());
    }
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // What links with it looks for it by name, not at the path where it was built.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,liboeq_native.so");
    if !links_with_lld() {
        println!(
            "cargo::warning=the shared library will not show the targets' plain names: that takes rustc 1.90 or newer with \
             its own linker, on x86-64"
        );
        return Ok(());
    }
    // rustc hides everything that is not exported from Rust; this script adds the plain names to what is shown.
    let mut script = "{ global:".to_owned();
    for name in PLAIN_NAMES {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--defsym={name}=oeq_execute_{name}");
        write!(script, " {name};")?;
    }
    script.push_str(" };\n");
    let path = Path::new(&std::env::var("OUT_DIR")?).join("plain_names.map");
    std::fs::write(&path, script)?;
    println!("cargo::rustc-cdylib-link-arg=-Wl,--version-script={}", path.display());
    Ok(())
}

/// Whether rustc links with LLD, which joins a second version script to rustc's own. GNU ld and gold take one only.
fn links_with_lld() -> bool {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let default = variable("TARGET") == "x86_64-unknown-linux-gnu" && rustc_minor().is_some_and(|minor| minor >= 90);
    let flags = variable("CARGO_ENCODED_RUSTFLAGS");
    let other = ["fuse-ld", "linker", "link-self-contained"].iter().any(|option| flags.contains(option));
    (default && !other && variable("RUSTC_LINKER").is_empty()) || flags.contains("fuse-ld=lld")
}

/// The minor version of `rustc 1.x.y`.
fn rustc_minor() -> Option<u32> {
    let rustc = std::env::var_os("RUSTC")?;
    let output = std::process::Command::new(rustc).arg("--version").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.split_whitespace().nth(1)?.split('.').nth(1)?.parse().ok()
}
