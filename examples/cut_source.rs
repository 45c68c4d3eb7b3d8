//! Shows what the runtime sees in a CUDA source, and the program that holds only some of its entry points.
//!
//! `cut_source FILE` prints the names of the entry points that FILE defines, one a line. `cut_source FILE NAME...`
//! prints the program that keeps only those; when the source is too unfamiliar to be cut it says so and exits with 1.
//! `tests/machine_code.py` compiles such programs.

use std::error::Error;
use std::io::Write;

use oeq_native::source;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let file = arguments.next().ok_or("usage: cut_source FILE [NAME...]")?;
    let keep: Vec<String> = arguments.collect();
    let text = std::fs::read_to_string(&file).map_err(|error| format!("{file}: {error}"))?;
    let mut out = std::io::stdout().lock();
    if keep.is_empty() {
        for entry in source::entry_points(&text)? {
            writeln!(out, "{}", entry.name)?;
        }
        return Ok(());
    }
    let keep: Vec<&str> = keep.iter().map(String::as_str).collect();
    let program = source::keep_only(&text, &keep).ok_or_else(|| format!("{file} cannot be cut to {keep:?}"))?;
    out.write_all(program.as_bytes())?;
    Ok(())
}
