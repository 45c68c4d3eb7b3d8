//! Execute functions without state: never another payload's kernel, whatever XLA does with its memory.
#![allow(clippy::unwrap_used, clippy::panic, clippy::undocumented_unsafe_blocks, reason = "a failed test should panic")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use common::*;
use oeq_native::xla::ffi;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The stand-in device's notes can be switched off for all only, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

fn stateless(target: &str) -> ffi::Handler {
    oeq_native::registry::table().unwrap().find(target).unwrap().stateless
}

fn execute(site: &mut Site, target: &str) -> Result<(), (i32, String)> {
    let handler = stateless(target);
    site.frame(true, |frame| {
        frame.stage = ffi::stage::EXECUTE;
        answer(unsafe { handler(frame) })
    })
}

fn site(payload: &str, batch: i64, stream: u64) -> Site {
    let operands = vec![f32s(1, &[batch, L1]), f32s(2, &[batch, L2]), f32s(3, &[batch, W])];
    let mut site = Site::new(4, payload, 7).with(operands, vec![f32s(4, &[batch, L3])]);
    site.context.stream = Some(stream);
    site
}

#[test]
fn memory_that_is_used_again_for_another_payload_gets_that_payloads_kernel() {
    let _turn = TURN.lock();
    let world = world();
    let stream = 0x51;
    // Equal lengths, equal hashes, one byte apart, at one address.
    let [one, two] = ["the left one", "the lefu one"].map(|mark| PayloadSpec { mark, ..PayloadSpec::default() }.json());
    assert_eq!(one.len(), two.len());
    let mut site = site(&one, 5, stream);
    let mut address = None;
    for payload in [&one, &two, &one, &one, &two, &two] {
        let Attr::Text(text) = &mut site.attributes[0].1 else { panic!() };
        text.copy_from_slice(payload.as_bytes());
        assert_eq!(*address.get_or_insert(text.as_ptr()), text.as_ptr());
        execute(&mut site, "tp_forward").unwrap();
    }
    let images: Vec<u64> = world.take(stream).iter().map(|work| work.launches[0].image).collect();
    assert_ne!(images[0], images[1]);
    assert_eq!(images, [0, 1, 0, 0, 1, 1].map(|i| images[i]));
}

#[test]
fn targets_orders_shapes_devices_and_streams_are_told_apart() {
    let _turn = TURN.lock();
    let world = world();
    let payload = PayloadSpec { mark: "told apart", ..PayloadSpec::default() }.json();
    for (stream, batch) in [(0x61, 5), (0x62, 6), (0x61, 5), (0x63, 7), (0x62, 6)] {
        let mut site = site(&payload, batch, stream);
        execute(&mut site, "tp_forward").unwrap();
        site.context.ordinal = 1;
        site.attributes.push(("derivative".into(), Attr::Int(0)));
        execute(&mut site, "oeq_tensor_product").unwrap();
        site.attributes.last_mut().unwrap().1 = Attr::Int(1);
        let (_, text) = execute(&mut site, "oeq_tensor_product").unwrap_err();
        assert!(text.contains("oeq_tensor_product, execute"), "{text}");
        let work = world.take(stream);
        let parameters = |index: usize| work[index].launches[0].parameters[0][0];
        assert_eq!((work.len(), parameters(0), parameters(1)), (2, batch.unsigned_abs(), batch.unsigned_abs()));
        assert_eq!((work[0].ordinal, work[1].ordinal), (0, 1));
    }
    // Wrong shapes are refused although the payload is known.
    let mut wrong = site(&payload, 5, 0x64);
    wrong.results[0].dimensions[1] += 1;
    for _ in 0..2 {
        let (code, text) = execute(&mut wrong, "tp_forward").unwrap_err();
        assert!(code == 3 && text.contains("L3_out"), "{text}");
    }
    let mut half = site(&payload, 5, 0x65);
    half.operands[1].dtype = ffi::data_type::F64;
    assert!(execute(&mut half, "tp_forward").is_err());
    half.operands.truncate(2);
    assert!(execute(&mut half, "tp_forward").is_err());
}

#[test]
fn more_calls_than_are_kept_still_work_and_warm_ones_allocate_nothing() {
    let _turn = TURN.lock();
    let world = world();
    let stream = 0x71;
    let payload = PayloadSpec { mark: "many", ..PayloadSpec::default() }.json();
    for round in 0..2 {
        for batch in 1..400 {
            execute(&mut site(&payload, batch, stream), "tp_forward").unwrap();
        }
        let work = world.take(stream);
        assert_eq!(work.len(), 399, "round {round}");
        assert!(work.iter().zip(1..).all(|(work, batch)| work.launches[0].parameters[0][0] == batch));
    }
    let handler = stateless("tp_forward");
    let mut site = site(&payload, 9, stream);
    execute(&mut site, "tp_forward").unwrap();
    world.silent.store(true, Ordering::SeqCst);
    let allocations = site.frame(true, |frame| {
        let before = ALLOCATIONS.get();
        for _ in 0..1000 {
            assert!(unsafe { handler(frame) }.is_null());
        }
        ALLOCATIONS.get() - before
    });
    world.silent.store(false, Ordering::SeqCst);
    assert_eq!(allocations, 0);
}

#[test]
fn what_is_missing_is_an_error_and_the_older_form_works() {
    let _turn = TURN.lock();
    let world = world();
    let spec = PayloadSpec { mark: "older stateless", ..PayloadSpec::default() };
    let mut missing = site(&spec.json(), 5, 0x81);
    missing.attributes.remove(0);
    let (code, text) = execute(&mut missing, "tp_forward").unwrap_err();
    assert!(code == 3 && text.contains("`kernel` is missing"), "{text}");

    let mut older = site(&spec.source(), 5, 0x82);
    let members = spec.members().into_iter().map(|(name, list)| (name.to_owned(), Attr::Dictionary(list)));
    older.attributes.extend(members);
    for _ in 0..3 {
        execute(&mut older, "tp_forward").unwrap();
    }
    assert_eq!(world.take(0x82).len(), 3);
}
