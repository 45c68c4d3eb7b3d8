//! Makes warm calls and nothing else, for a tool that counts instructions (`benches/instructions.sh`).
//!
//! usage: calls TARGET execute|initialize|stateless COUNT; without arguments it does nothing.
#![allow(
    missing_docs,
    clippy::wildcard_imports,
    clippy::unwrap_used,
    clippy::panic,
    clippy::undocumented_unsafe_blocks,
    unreachable_pub,
    reason = "a benchmark may panic, and its frames live through each closure"
)]

mod cases;
#[path = "../tests/common/mod.rs"]
mod common;

use std::hint::black_box;
use std::sync::atomic::Ordering;

use common::*;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let [wanted, stage, count] = &arguments[..] else { return };
    let count: usize = count.parse().unwrap();
    world().silent.store(true, Ordering::Relaxed);
    for (target, mut site) in cases::cases().into_iter().filter(|(target, _)| target == wanted) {
        let entry = oeq_native::registry::table().unwrap().find(target).unwrap();
        let handler = match stage.as_str() {
            "execute" => entry.bundle.execute.unwrap(),
            "initialize" => entry.bundle.initialize.unwrap(),
            // What a host calls that registers the plain symbol alone.
            "stateless" => entry.stateless,
            _ => panic!("no stage is named {stage}"),
        };
        if stage == "stateless" {
            assert_eq!(site.call(Some(handler), true), Ok(()));
        } else {
            site.run(target).unwrap();
        }
        site.frame(true, |frame| {
            let frame: *mut _ = frame;
            for _ in 0..count {
                assert!(unsafe { handler(black_box(frame)) }.is_null());
            }
        });
    }
}
