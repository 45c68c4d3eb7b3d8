//! The lifecycle of a call site, stage by stage, in a stand-in XLA of every FFI minor version and on a stand-in device:
//! what is compiled, shared, loaded, zeroed and launched, and what every mistake is answered with.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_sign_loss,
    reason = "a failed test should panic; shapes in these tests are small and positive"
)]

mod common;

use std::sync::atomic::Ordering;

use common::*;
use oeq_native::compile::Architecture;
use oeq_native::driver::Zero;

const SM_90: Architecture = ARCHITECTURES[0];
const SM_80: Architecture = ARCHITECTURES[1];

/// A stream of its own for each test, so that notes do not mix.
fn on_stream(mut site: Site, stream: u64) -> Site {
    site.context.stream = Some(stream);
    site
}

fn tp_tensors(order: usize, batch: i64, shared: bool) -> (Vec<Tensor>, Vec<Tensor>) {
    let weights = |address| if shared { f32s(address, &[W]) } else { f32s(address, &[batch, W]) };
    let (l1, l2, l3) = (f32s(0x1000, &[batch, L1]), f32s(0x2000, &[batch, L2]), |a| f32s(a, &[batch, L3]));
    match order {
        0 => (vec![l1, l2, weights(0x3000)], vec![l3(0x9000)]),
        1 => (
            vec![l1, l2, weights(0x3000), l3(0x4000)],
            vec![f32s(0x9100, &[batch, L1]), f32s(0x9200, &[batch, L2]), weights(0x9300)],
        ),
        _ => (
            vec![
                l1,
                l2,
                weights(0x3000),
                l3(0x4000),
                f32s(0x5000, &[batch, L1]),
                f32s(0x6000, &[batch, L2]),
                weights(0x7000),
            ],
            vec![f32s(0x9100, &[batch, L1]), f32s(0x9200, &[batch, L2]), weights(0x9300), l3(0x9400)],
        ),
    }
}

fn conv_tensors(order: usize, nodes: i64, edges: i64, deterministic: bool) -> (Vec<Tensor>, Vec<Tensor>) {
    let mut operands = vec![f32s(0x1000, &[nodes, L1]), f32s(0x2000, &[edges, L2]), f32s(0x3000, &[edges, W])];
    let gradients = vec![f32s(0x9100, &[nodes, L1]), f32s(0x9200, &[edges, L2]), f32s(0x9300, &[edges, W])];
    let mut results = match order {
        0 => vec![f32s(0x9000, &[nodes, L3])],
        _ => gradients,
    };
    if order > 0 {
        operands.push(f32s(0x4000, &[nodes, L3]));
    }
    if order > 1 {
        operands.extend([f32s(0x5000, &[nodes, L1]), f32s(0x6000, &[edges, L2]), f32s(0x7000, &[edges, W])]);
        results.push(f32s(0x9400, &[nodes, L3]));
    }
    let (workspace, perm) = if deterministic { (WORKSPACE, edges) } else { (1, 1) };
    operands.extend([
        i32s(0xa000, &[edges]),
        i32s(0xb000, &[edges]),
        bytes(0xc000, &[workspace]),
        i32s(0xd000, &[perm]),
    ]);
    (operands, results)
}

fn zero(address: u64, bytes: u64) -> Zero {
    Zero { address, bytes }
}

fn words(list: &[u64]) -> Vec<Vec<u64>> {
    list.iter().map(|word| vec![*word]).collect()
}

#[test]
fn every_version_runs_the_whole_lifecycle() {
    let world = world();
    for minor in 1..=5 {
        let mark = format!("whole lifecycle {minor}");
        let payload = PayloadSpec { mark: &mark, ..PayloadSpec::default() }.json();
        let stream = 0x100 + minor as u64;
        let (operands, results) = tp_tensors(1, 5, false);
        let mut site = on_stream(Site::new(minor, &payload, -1), stream).with(operands, results);
        site.run("tp_backward").unwrap();
        site.execute("tp_backward").unwrap();
        let work = world.take(stream);
        assert_eq!(work.len(), 2);
        assert_eq!(work[0], work[1]);
        assert_eq!(work[0].ordinal, 0);
        assert_eq!(
            work[0].zeros,
            [zero(0x9100, 5 * L1 as u64 * 4), zero(0x9200, 5 * L2 as u64 * 4), zero(0x9300, 5 * W as u64 * 4)]
        );
        let launch = &work[0].launches[..];
        assert_eq!(launch.len(), 1);
        assert_eq!((launch[0].entry.as_str(), launch[0].blocks, launch[0].threads), ("backward", 22, 96));
        assert_eq!(launch[0].shared_bytes, 1001);
        assert_eq!(launch[0].parameters, words(&[5, 0x1000, 0x9100, 0x2000, 0x9200, 0x3000, 0x9300, 0x4000]));
        assert!(site.context.state.is_some());
    }
}

#[test]
fn tensor_products_of_all_orders_launch_what_the_contract_says() {
    let world = world();
    let payload = PayloadSpec { mark: "tp orders", shared_weights: true, ..PayloadSpec::default() }.json();
    let stream = 0x200;
    let (operands, results) = tp_tensors(0, 3, true);
    on_stream(Site::new(3, &payload, 1), stream).with(operands, results).run("tp_forward").unwrap();
    let (operands, results) = tp_tensors(2, 3, true);
    on_stream(Site::new(3, &payload, 1), stream).with(operands, results).run("tp_double_backward").unwrap();
    let work = world.take(stream);
    assert!(work[0].zeros.is_empty());
    assert_eq!(work[0].launches[0].parameters, words(&[3, 0x1000, 0x2000, 0x9000, 0x3000]));
    assert_eq!(work[1].zeros.len(), 4);
    assert_eq!(work[1].zeros[2], zero(0x9300, W as u64 * 4));
    let names: Vec<_> = work[1].launches.iter().map(|l| (l.entry.as_str(), l.blocks, l.shared_bytes)).collect();
    assert_eq!(names, [("double_backward_A", 11, 1000), ("double_backward_B", 33, 1002)]);
    let parameters =
        words(&[3, 0x1000, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000, 0x7000, 0x9100, 0x9200, 0x9300, 0x9400]);
    assert_eq!(work[1].launches[0].parameters, parameters);
    assert_eq!(work[1].launches[1].parameters, parameters);
}

#[test]
fn convolutions_of_all_orders_pass_the_graph_and_run_their_fix_ups() {
    let world = world();
    for deterministic in [false, true] {
        let mark = format!("conv orders {deterministic}");
        let payload = PayloadSpec { mark: &mark, convolution: true, deterministic, ..PayloadSpec::default() }.json();
        let stream = 0x300 + u64::from(deterministic);
        for (order, target) in ["conv_forward", "conv_backward", "conv_double_backward"].iter().enumerate() {
            let (operands, results) = conv_tensors(order, 7, 20, deterministic);
            on_stream(Site::new(4, &payload, 9), stream).with(operands, results).run(target).unwrap();
        }
        let work = world.take(stream);
        let names: Vec<Vec<_>> = work.iter().map(|w| w.launches.iter().map(|l| l.entry.as_str()).collect()).collect();
        let expected: [&[&str]; 3] = if deterministic {
            [
                &["forward", "fixup_forward"],
                &["backward", "fixup_backward"],
                &["double_backward_A", "fixup_forward", "double_backward_B", "fixup_double_backwardB"],
            ]
        } else {
            [&["forward"], &["backward"], &["double_backward_A", "double_backward_B"]]
        };
        assert_eq!(names, expected);
        assert_eq!(work.iter().map(|w| w.zeros.len()).collect::<Vec<_>>(), [1, 3, 4]);

        let workspace = if deterministic { 0xc000 } else { 0 };
        let graph = vec![0xa000, 0xb000, 20, 7];
        let mut forward = words(&[0x1000, 0x2000, 0x3000, 0x9000]);
        forward.extend([graph.clone(), vec![workspace]]);
        assert_eq!(work[0].launches[0].parameters, forward);
        let mut backward = words(&[0x1000, 0x9100, 0x2000, 0x9200, 0x3000, 0x9300, 0x4000]);
        backward.extend([graph, vec![workspace], vec![0xd000]]);
        assert_eq!(work[1].launches[0].parameters, backward);
        if deterministic {
            let destinations: Vec<_> = work
                .iter()
                .flat_map(|w| &w.launches)
                .filter(|l| l.entry.starts_with("fixup"))
                .map(|l| (l.entry.as_str(), l.blocks, l.shared_bytes, l.parameters.clone()))
                .collect();
            let to = |address| words(&[0xc000, address]);
            assert_eq!(
                destinations,
                [
                    ("fixup_forward", 11, 0, to(0x9000)),
                    ("fixup_backward", 22, 0, to(0x9100)),
                    ("fixup_forward", 11, 0, to(0x9400)),
                    ("fixup_double_backwardB", 33, 0, to(0x9100)),
                ]
            );
        }
    }
}

#[test]
fn the_extra_workspace_result_replaces_the_operand() {
    let world = world();
    let spec = PayloadSpec { mark: "both forms", convolution: true, deterministic: true, ..PayloadSpec::default() };
    let payload = spec.json();
    let stream = 0x400;
    for (order, target) in ["conv_forward", "conv_backward", "conv_double_backward"].iter().enumerate() {
        let (operands, mut results) = conv_tensors(order, 7, 20, true);
        results.push(bytes(0xeeee, &[WORKSPACE]));
        on_stream(Site::new(5, &payload, 9), stream).with(operands.clone(), results.clone()).run(target).unwrap();
        // A wrong size is told; the extra result is not zeroed.
        results.last_mut().unwrap().dimensions = vec![WORKSPACE - 1];
        let (_, text) = Site::new(5, &payload, 9).with(operands, results).run(target).unwrap_err();
        assert!(text.contains("workspace (result)") && text.contains("[4096]") && text.contains("[4095]"), "{text}");
    }
    for (work, zeros) in world.take(stream).iter().zip([1, 3, 4]) {
        assert_eq!(work.zeros.len(), zeros);
        for launch in work.launches.iter().filter(|l| l.entry.starts_with("fixup")) {
            assert_eq!(launch.parameters[0], [0xeeee]);
        }
        assert!(work.launches[0].parameters.contains(&vec![0xeeee]));
    }
}

#[test]
fn variadic_targets_do_what_the_classic_ones_do() {
    let world = world();
    let tp = PayloadSpec { mark: "variadic", ..PayloadSpec::default() }.json();
    let conv = PayloadSpec { mark: "variadic", convolution: true, ..PayloadSpec::default() }.json();
    let cases = [
        ("oeq_tensor_product", &tp, ["tp_forward", "tp_backward", "tp_double_backward"]),
        ("oeq_convolution", &conv, ["conv_forward", "conv_backward", "conv_double_backward"]),
    ];
    for (variadic, payload, classic) in cases {
        for (order, classic) in classic.into_iter().enumerate() {
            let (operands, results) =
                if classic.starts_with("tp") { tp_tensors(order, 4, false) } else { conv_tensors(order, 7, 20, false) };
            let stream = 0x500;
            on_stream(Site::new(2, payload, 3), stream).with(operands.clone(), results.clone()).run(classic).unwrap();
            let mut site = on_stream(Site::new(2, payload, 3), stream).with(operands, results);
            site.attributes.push(("derivative".into(), Attr::Int(i64::try_from(order).unwrap())));
            site.run(variadic).unwrap();
            let work = world.take(stream);
            assert_eq!(work[0], work[1], "{variadic} {order}");
        }
        for (derivative, expected) in [(3, "expected 0 to 2"), (-1, "expected 0 to 2")] {
            let mut site = Site::new(2, payload, 3);
            site.attributes.push(("derivative".into(), Attr::Int(derivative)));
            let (code, text) = site.instantiate(variadic, false).unwrap_err();
            assert_eq!(code, 3);
            assert!(text.contains(&derivative.to_string()) && text.contains(expected), "{text}");
        }
        let (_, text) = Site::new(2, payload, 3).instantiate(variadic, false).unwrap_err();
        assert!(text.contains("`derivative` is missing"), "{text}");
    }
}

#[test]
fn equal_kernels_share_one_compilation_and_one_module_per_device() {
    let world = world();
    let mark = "shared by many";
    let payload = PayloadSpec { mark, convolution: true, ..PayloadSpec::default() }.json();
    let (operands, results) = conv_tensors(1, 7, 20, false);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (payload, operands, results) = (&payload, operands.clone(), results.clone());
            scope.spawn(move || {
                let stream = 0x600 + thread;
                let mut site = on_stream(Site::new(3, payload, 77), stream).with(operands, results);
                site.context.ordinal = i32::try_from(thread % 2).unwrap();
                site.run("conv_backward").unwrap();
            });
        }
    });
    // Both architectures were scheduled, each once, and only the unit that conv_backward calls.
    assert_eq!((world.compilations(mark, SM_90), world.compilations(mark, SM_80)), (1, 1));
    let images: Vec<_> = (0..8).map(|t| (t % 2, world.take(0x600 + t)[0].launches[0].image)).collect();
    for (device, image) in &images {
        assert_eq!(*image, images[usize::try_from(*device).unwrap()].1);
    }
    assert_ne!(images[0].1, images[1].1);
}

#[test]
fn only_the_units_that_a_model_calls_are_compiled() {
    let world = world();
    let mark = "on demand";
    let payload = PayloadSpec { mark, ..PayloadSpec::default() }.json();
    let (operands, results) = tp_tensors(0, 5, false);
    Site::new(3, &payload, 5).with(operands, results).run("tp_forward").unwrap();
    assert_eq!(world.compilations(mark, SM_90), 1);
    let (operands, results) = tp_tensors(2, 5, false);
    Site::new(3, &payload, 5).with(operands, results).run("tp_double_backward").unwrap();
    assert_eq!(world.compilations(mark, SM_90), 3);
    let compiled = world.compiled.lock().unwrap();
    let entries: Vec<_> = compiled.iter().filter(|(s, a, _)| s.contains(mark) && *a == SM_90).collect();
    let mut kept: Vec<_> = entries.iter().flat_map(|(_, _, entries)| entries.clone()).collect();
    kept.sort();
    assert_eq!(kept, ["double_backward_A", "double_backward_B", "forward"]);
    for (source, _, kept) in entries {
        assert_eq!(source.matches("__global__").count(), kept.len(), "{source}");
    }
}

#[test]
fn equal_hashes_of_different_payloads_never_alias() {
    let world = world();
    let first = PayloadSpec { mark: "collision one", ..PayloadSpec::default() }.json();
    let second = PayloadSpec { mark: "collision two", ..PayloadSpec::default() }.json();
    // The same text with one unknown member more is another kernel too: a later version may give it a meaning.
    let third = format!("{{\"later\": 1, {}", &first[1..]);
    let mut images = Vec::new();
    for (index, payload) in [&first, &second, &third, &first].into_iter().enumerate() {
        let stream = 0x700 + index as u64;
        let (operands, results) = tp_tensors(0, 5, false);
        on_stream(Site::new(3, payload, 42), stream).with(operands, results).run("tp_forward").unwrap();
        images.push(world.take(stream)[0].launches[0].image);
    }
    assert_eq!(images[0], images[3]);
    assert!(images[0] != images[1] && images[0] != images[2] && images[1] != images[2], "{images:?}");
    // The other family is another kernel with the same hash and nearly the same text.
    let conv = PayloadSpec { mark: "collision one", convolution: true, ..PayloadSpec::default() }.json();
    let (operands, results) = conv_tensors(0, 7, 20, false);
    on_stream(Site::new(3, &conv, 42), 0x710).with(operands, results).run("conv_forward").unwrap();
    assert!(!images.contains(&world.take(0x710)[0].launches[0].image));
}

#[test]
fn the_older_attribute_form_is_the_same_kernel_in_other_words() {
    let world = world();
    let spec = PayloadSpec { mark: "dictionaries", convolution: true, deterministic: true, ..PayloadSpec::default() };
    let (operands, results) = conv_tensors(1, 7, 20, true);
    let stream = 0x800;
    on_stream(Site::new(1, &spec.json(), 5), stream)
        .with(operands.clone(), results.clone())
        .run("conv_backward")
        .unwrap();
    let old = |members: Vec<(&str, Vec<(String, i64)>)>| {
        let mut site = on_stream(Site::new(1, &spec.source(), 5), stream).with(operands.clone(), results.clone());
        site.attributes.extend(members.into_iter().map(|(name, list)| (name.to_owned(), Attr::Dictionary(list))));
        site
    };
    old(spec.members()).run("conv_backward").unwrap();
    let work = world.take(stream);
    assert_eq!(work[0].zeros, work[1].zeros);
    assert_eq!(work[0].launches[0].parameters, work[1].launches[0].parameters);
    assert_ne!(work[0].launches[0].image, work[1].launches[0].image);

    let mut broken = spec.members();
    broken[0].1.retain(|(name, _)| name != "num_threads");
    let (code, text) = old(broken).instantiate("conv_backward", true).unwrap_err();
    assert_eq!(code, 3);
    assert!(text.contains("forward_config.num_threads"), "{text}");
}

#[test]
fn a_handler_registered_alone_works_without_state() {
    let world = world();
    for minor in 1..=5 {
        let payload = PayloadSpec { mark: "stateless", ..PayloadSpec::default() }.json();
        let stream = 0x900 + minor as u64;
        for batch in [5, 6] {
            let (operands, results) = tp_tensors(0, batch, false);
            let mut site = on_stream(Site::new(minor, &payload, 8), stream).with(operands, results);
            // Initialize alone is harmless too.
            site.initialize("tp_forward").unwrap();
            site.execute("tp_forward").unwrap();
            site.execute("tp_forward").unwrap();
            assert!(site.context.state.is_none());
        }
        let work = world.take(stream);
        let batches: Vec<_> = work.iter().map(|w| w.launches[0].parameters[0][0]).collect();
        assert_eq!(batches, [5, 5, 6, 6]);
    }
    assert_eq!(world.compilations("stateless", SM_90), 1);
}

#[test]
fn a_failed_compilation_reaches_everybody_and_may_be_tried_again() {
    let world = world();
    let mark = "fails at first";
    world.failing.lock().unwrap().push(mark.to_owned());
    let payload = PayloadSpec { mark, ..PayloadSpec::default() }.json();
    let (operands, results) = tp_tensors(0, 5, false);
    let mut sites: Vec<Site> =
        (0..4).map(|_| Site::new(3, &payload, 6).with(operands.clone(), results.clone())).collect();
    for site in &mut sites {
        site.instantiate("tp_forward", true).unwrap();
    }
    for site in &mut sites {
        let (code, text) = site.execute("tp_forward").unwrap_err();
        assert_eq!(code, 3);
        assert!(text.contains("identifier \"nonsense\" is undefined"), "{text}");
        assert!(text.starts_with("oeq-native: tp_forward, execute:"), "{text}");
    }
    world.failing.lock().unwrap().retain(|text| text != mark);
    // The same call site still reports what happened; a new instantiate tries again, and then all of them work.
    assert!(sites[0].execute("tp_forward").is_err());
    let mut again = on_stream(Site::new(3, &payload, 6).with(operands, results), 0xa00);
    again.run("tp_forward").unwrap();
    sites[0].execute("tp_forward").unwrap();
    assert_eq!(world.take(0xa00).len(), 1);
}

#[test]
fn a_panic_in_the_compiler_is_an_error_and_the_process_lives() {
    let world = world();
    world.panicking.lock().unwrap().push("panics".to_owned());
    let payload = PayloadSpec { mark: "panics", ..PayloadSpec::default() }.json();
    let (operands, results) = tp_tensors(0, 5, false);
    let (code, text) = Site::new(3, &payload, 6).with(operands, results).run("tp_forward").unwrap_err();
    assert_eq!(code, 13);
    assert!(text.contains("bug in oeq-native"), "{text}");
}

#[test]
fn wrong_tensors_are_told_at_instantiate_where_they_are_seen_and_at_execute_where_not() {
    type Change = fn(&mut Vec<Tensor>, &mut Vec<Tensor>);
    let cases: &[(Change, &[&str])] = &[
        (|o, _| drop(o.pop()), &["7 operands", "expected 8", "transpose_perm"]),
        (|_, r| drop(r.pop()), &["2 results", "expected 3", "W_grad", "optionally the workspace"]),
        (|o, _| o[0].dtype = 12, &["`L1_in`", "f64", "expected f32"]),
        (|o, _| o[0].dtype = 99, &["`L1_in`", "XLA type 99", "expected f32"]),
        (|o, _| o[4].dtype = 5, &["`rows`", "i64", "expected i32"]),
        (|o, _| o[0].dimensions = vec![7, L1 + 1], &["`L1_in`", "[7, 7]", "[7, 6]"]),
        (|o, _| o[0].dimensions = vec![7], &["`L1_in`", "[7]", "rank 2"]),
        (
            |o, _| o[1].dimensions = vec![19, L2],
            &["`L2_in`", "[19, 4]", "[20, 4]", "number of edges comes from `rows`"],
        ),
        (|o, _| o[2].dimensions = vec![W], &["`W`", "[8]", "[20, 8]"]),
        (|o, _| o[5].dimensions = vec![21], &["`cols`", "[21]", "[20]"]),
        (|o, _| o[6].dimensions = vec![2], &["`workspace`", "[2]", "[1]"]),
        (|_, r| r[0].dimensions = vec![8, L1], &["`L1_grad`", "[8, 6]", "[7, 6]", "number of nodes"]),
        (|o, _| o[0].dimensions = vec![-7, L1], &["`L1_in`", "negative"]),
    ];
    world();
    let payload = PayloadSpec { mark: "wrong tensors", convolution: true, ..PayloadSpec::default() }.json();
    for (change, expected) in cases {
        let (mut operands, mut results) = conv_tensors(1, 7, 20, false);
        change(&mut operands, &mut results);
        for seen in [true, false] {
            let mut site = Site::new(3, &payload, 5).with(operands.clone(), results.clone());
            let answer = site.instantiate("conv_backward", seen);
            let (code, text) = if seen {
                answer.unwrap_err()
            } else {
                answer.unwrap();
                site.execute("conv_backward").unwrap_err()
            };
            assert_eq!(code, 3, "{text}");
            for part in *expected {
                assert!(text.contains(part), "{part} is not in: {text}");
            }
        }
    }
}

#[test]
fn wrong_payloads_are_told_at_instantiate() {
    world();
    let good = PayloadSpec { mark: "wrong payloads", ..PayloadSpec::default() }.json();
    let bad = [
        (good.replace("\"num_threads\":64", "\"num_threads\":0"), "forward_config.num_threads"),
        (good.replace("\"L2_dim\":4", "\"L2_dim\":\"four\""), "kernel_prop.L2_dim"),
        (good.replace("void __launch_bounds__(64)\\nbackward", "void __launch_bounds__(64)\\nbackwards"), "backward"),
        (good[..good.len() - 1].to_owned(), "JSON"),
    ];
    for (payload, part) in bad {
        assert_ne!(payload, good);
        let (code, text) = Site::new(3, &payload, 5).instantiate("tp_forward", false).unwrap_err();
        assert_eq!(code, 3);
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let mut site = Site::new(3, &good, 5);
    site.attributes.retain(|(name, _)| name != "kernel");
    assert!(site.instantiate("tp_forward", false).unwrap_err().1.contains("`kernel` is missing"));
    let mut site = Site::new(3, &good, 5);
    site.attributes[0].1 = Attr::Int(3);
    assert!(site.instantiate("tp_forward", false).unwrap_err().1.contains("`kernel` is an integer"));
}

#[test]
fn empty_work_zeroes_and_launches_nothing() {
    let world = world();
    let payload = PayloadSpec { mark: "empty", convolution: true, ..PayloadSpec::default() }.json();
    let stream = 0xb00;
    for (nodes, edges) in [(7, 0), (0, 0)] {
        let (operands, results) = conv_tensors(1, nodes, edges, false);
        let nothing = |tensors: Vec<Tensor>| -> Vec<Tensor> {
            let empty = |t: &Tensor| t.dimensions.contains(&0);
            tensors.into_iter().map(|t| if empty(&t) { Tensor { address: 0, ..t } } else { t }).collect()
        };
        on_stream(Site::new(3, &payload, 5), stream)
            .with(nothing(operands), nothing(results))
            .run("conv_backward")
            .unwrap();
    }
    let work = world.take(stream);
    assert_eq!(work[0].zeros, [zero(0x9100, 7 * L1 as u64 * 4)]);
    assert!(work[1].zeros.is_empty());
    assert!(work.iter().all(|w| w.launches.is_empty()));
}

#[test]
fn large_results_are_counted_in_64_bits() {
    let world = world();
    let payload = PayloadSpec { mark: "large", ..PayloadSpec::default() }.json();
    let batch = 3_000_000_000;
    let (operands, results) = tp_tensors(1, batch, false);
    on_stream(Site::new(3, &payload, 5), 0xc00).with(operands, results).run("tp_backward").unwrap();
    let work = world.take(0xc00);
    assert_eq!(work[0].zeros[0].bytes, batch as u64 * L1 as u64 * 4);
    assert_eq!(work[0].launches[0].parameters[0], [batch as u64]);
    let (operands, results) = tp_tensors(1, i64::MAX / 8, false);
    let (_, text) = Site::new(3, &payload, 5).with(operands, results).run("tp_backward").unwrap_err();
    assert!(text.contains("too large"), "{text}");
}

#[test]
fn shared_memory_beyond_the_device_is_refused_at_initialize_with_both_numbers() {
    world();
    let smem = DEVICE_SHARED + 4;
    let payload = PayloadSpec { mark: "greedy", smem, ..PayloadSpec::default() }.json();
    let (operands, results) = tp_tensors(0, 5, false);
    let mut site = Site::new(3, &payload, 5).with(operands, results);
    site.instantiate("tp_forward", true).unwrap();
    // Initialize only sees it once the image is there; execute always does.
    let (code, text) = site.initialize("tp_forward").and_then(|()| site.execute("tp_forward")).unwrap_err();
    assert_eq!(code, 9);
    assert!(text.contains(&smem.to_string()) && text.contains(&DEVICE_SHARED.to_string()), "{text}");
}

#[test]
fn a_refused_state_is_destroyed_by_us_and_the_reason_reaches_xla() {
    world();
    let payload = PayloadSpec { mark: "refused", ..PayloadSpec::default() }.json();
    let mut site = Site::new(4, &payload, 5);
    site.context.refuse_state = true;
    let (_, text) = site.instantiate("tp_forward", false).unwrap_err();
    assert!(text.contains("state refused on purpose"), "{text}");
}

#[test]
fn a_device_that_is_not_there_and_a_platform_without_streams_are_clear_errors() {
    world();
    let payload = PayloadSpec { mark: "elsewhere", ..PayloadSpec::default() }.json();
    let (operands, results) = tp_tensors(0, 5, false);
    let mut site = Site::new(3, &payload, 5).with(operands.clone(), results.clone());
    site.context.ordinal = 7;
    let (_, text) = site.run("tp_forward").unwrap_err();
    assert!(text.contains("ordinal 7") && text.contains("sees 2"), "{text}");
    let mut site = Site::new(3, &payload, 5).with(operands, results);
    site.context.stream = None;
    let (code, text) = site.run("tp_forward").unwrap_err();
    assert_eq!(code, 9);
    assert!(text.contains("runs on CUDA"), "{text}");
}

#[test]
fn no_error_object_is_leaked() {
    // Every other test checks answers; this one makes the api fail inside a stage, where we must destroy what we got.
    world();
    let payload = PayloadSpec { mark: "errors", ..PayloadSpec::default() }.json();
    let (operands, results) = tp_tensors(0, 5, false);
    let before = LIVE_ERRORS.load(Ordering::SeqCst);
    let mut leaked = 0;
    for _ in 0..50 {
        let mut site = Site::new(3, &payload, 5).with(operands.clone(), results.clone());
        site.execute("tp_forward").unwrap();
        leaked = LIVE_ERRORS.load(Ordering::SeqCst) - before;
    }
    // Other tests hold a few errors while they run; a leak here would show as at least fifty.
    assert!(leaked < 50, "{leaked} error objects are alive");
}
