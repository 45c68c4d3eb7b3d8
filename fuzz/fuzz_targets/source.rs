//! CUDA text: entry points lie where they are said to be, and a cut program holds those that were asked for, as they were and
//! on the same lines, and no other that produces code.

#![no_main]

use libfuzzer_sys::fuzz_target;
use oeq_native::source::{entry_points, host, keep_only};

const DROP: &str = "template<int> ";

fuzz_target!(|input: &[u8]| {
    let Ok(source) = std::str::from_utf8(input) else { return };
    let _ = host::for_host(source);
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
        assert_eq!(cut.matches('\n').count(), source.matches('\n').count());
        let cut_entries = entry_points(&cut).expect("a cut program can be lexed");
        let line = |text: &str, at: usize| text[..at].matches('\n').count();
        for before in entries.iter().filter(|entry| keep.contains(&entry.name.as_str())) {
            let after = cut_entries.iter().find(|entry| entry.name == before.name).expect("an entry point that was kept");
            assert_eq!(source[before.body.clone()], cut[after.body.clone()]);
            assert_eq!(line(source, before.global_at), line(&cut, after.global_at));
            assert!(!cut[..after.global_at].ends_with(DROP));
        }
        for other in cut_entries.iter().filter(|entry| !keep.contains(&entry.name.as_str())) {
            assert!(cut[..other.global_at].ends_with(DROP));
        }
    }
});
