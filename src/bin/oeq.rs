//! The `oeq` tool, see [`oeq_native::cli`].

fn main() -> std::process::ExitCode {
    oeq_native::cli::main()
}
