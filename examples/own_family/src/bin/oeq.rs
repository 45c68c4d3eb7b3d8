//! The `oeq` tool with this crate's target in it.

// Names the crate, so that its targets are linked.
use own_family as _;

fn main() -> std::process::ExitCode {
    oeq_native::cli::main()
}
