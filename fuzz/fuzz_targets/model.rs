//! Model files of every kind, told apart as the tool does. Reading one costs memory in proportion to its size, over which
//! libFuzzer's own limit (`-rss_limit_mb`) watches, and what was read can be surveyed.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oeq_native::model::{read, survey};

fuzz_target!(|input: &[u8]| {
    if let Ok(model) = read(input) {
        let _ = survey(&model);
    }
});
