//! CUDA text: entry points lie where they are said to be, and a cut program differs from the whole only in what was put
//! before `__global__`, on the same lines.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oeq_native::source::{entry_points, keep_only};

const DROP: &str = "template<int> ";

fuzz_target!(|input: &[u8]| {
    let Ok(source) = std::str::from_utf8(input) else { return };
    let Ok(entries) = entry_points(source) else {
        assert_eq!(keep_only(source, &[]), None);
        return;
    };
    for entry in &entries {
        let text = &source[entry.body.clone()];
        assert!(entry.body.contains(&entry.global_at) && text.contains(&entry.name));
        assert!(source[entry.global_at..].starts_with("__global__"));
    }
    let all: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
    let Some(same) = keep_only(source, &all) else { return };
    assert_eq!(same, source);
    for keep in all.iter().map(|name| vec![*name]).take(4).chain([vec![], all.iter().copied().step_by(2).collect()]) {
        let cut = keep_only(source, &keep).expect("whether a program can be cut must not depend on what is kept");
        assert_eq!(cut.len(), source.len() + DROP.len() * (all.len() - keep.len()));
        assert_eq!(cut.lines().count(), source.lines().count());
        let cut_entries = entry_points(&cut).expect("a cut program can be lexed");
        assert_eq!(cut_entries.len(), entries.len());
        let mut shift = 0;
        for (before, after) in entries.iter().zip(&cut_entries) {
            let dropped = !keep.contains(&before.name.as_str());
            shift += if dropped { DROP.len() } else { 0 };
            assert_eq!(before.name, after.name);
            assert_eq!(before.global_at + shift, after.global_at);
            assert_eq!(dropped, cut[..after.global_at].ends_with(DROP));
            assert_eq!(source[before.global_at..before.body.end], cut[after.global_at..after.body.end]);
        }
    }
});
