//! Our definitions of XLA's FFI structures against the headers of real jaxlib wheels.
//!
//! `tests/abi/fetch.sh` takes the headers out of the wheels, compiles `tests/abi/abi_dump.c` against each and leaves
//! what it prints in a folder, which `OEQ_TEST_ABI` names (`target/test-cache/abi` by default). Here the same facts are
//! derived from `oeq_native::xla::ffi`, and both must agree line by line, in both directions.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::mem::offset_of;
use std::path::{Path, PathBuf};

use oeq_native::error::Code;
use oeq_native::xla::ffi::{self, StructSize};

type Facts = BTreeMap<String, i64>;

fn put(facts: &mut Facts, name: &str, value: impl TryInto<i64>) {
    let value = value.try_into().ok().unwrap();
    assert!(facts.insert(name.to_owned(), value).is_none(), "{name} is given twice");
}

/// Puts the size and all offsets of a structure under a name. Every field must be listed: the pattern has no `..`.
macro_rules! plain {
    ($facts:expr, $name:literal, $type:ident { $($field:ident),+ $(,)? }) => {
        let _ = |structure: &ffi::$type| {
            let ffi::$type { $($field: _),+ } = structure;
        };
        put($facts, concat!($name, ".sizeof"), size_of::<ffi::$type>());
        $(put($facts, concat!($name, ".", stringify!($field)), offset_of!(ffi::$type, $field));)+
    };
}

/// The same with the size that XLA reports.
macro_rules! reported {
    ($facts:expr, $name:literal, $type:ident { $($field:ident),+ $(,)? }) => {
        plain!($facts, $name, $type { struct_size, $($field),+ });
        put($facts, concat!($name, ".STRUCT_SIZE"), ffi::$type::STRUCT_SIZE);
    };
}

/// The same with a chain of extensions.
macro_rules! extensible {
    ($facts:expr, $name:literal, $type:ident { $($field:ident),+ $(,)? }) => {
        reported!($facts, $name, $type { extension_start, $($field),+ });
    };
}

fn constants(facts: &mut Facts, minor: i64) {
    put(facts, "API_MAJOR", ffi::API_MAJOR);
    put(facts, "API_MINOR", minor);
    put(facts, "EXTENSION_METADATA", ffi::EXTENSION_METADATA);
    put(facts, "TRAIT_COMMAND_BUFFER_COMPATIBLE", ffi::TRAIT_COMMAND_BUFFER_COMPATIBLE);
    for (name, value) in [
        ("data_type.S32", ffi::data_type::S32),
        ("data_type.S64", ffi::data_type::S64),
        ("data_type.U8", ffi::data_type::U8),
        ("data_type.F32", ffi::data_type::F32),
        ("data_type.F64", ffi::data_type::F64),
        ("arg_type.BUFFER", ffi::TENSOR_BUFFER),
        ("ret_type.BUFFER", ffi::TENSOR_BUFFER),
        ("attr_type.ARRAY", ffi::attr_type::ARRAY),
        ("attr_type.DICTIONARY", ffi::attr_type::DICTIONARY),
        ("attr_type.SCALAR", ffi::attr_type::SCALAR),
        ("attr_type.STRING", ffi::attr_type::STRING),
        ("stage.INSTANTIATE", ffi::stage::INSTANTIATE),
        ("stage.PREPARE", ffi::stage::PREPARE),
        ("stage.INITIALIZE", ffi::stage::INITIALIZE),
        ("stage.EXECUTE", ffi::stage::EXECUTE),
    ] {
        put(facts, name, value);
    }
    if minor >= 4 {
        put(facts, "stage.RECORD", ffi::stage::RECORD);
    }
    for code in [
        Code::InvalidArgument,
        Code::NotFound,
        Code::AlreadyExists,
        Code::ResourceExhausted,
        Code::FailedPrecondition,
        Code::Unimplemented,
        Code::Internal,
        Code::Unavailable,
    ] {
        put(facts, &format!("code.{}", code.name()), code as i32);
    }
    for kind in ["extension_type", "data_type", "arg_type", "ret_type", "attr_type", "stage", "code"] {
        put(facts, &format!("{kind}.sizeof"), size_of::<c_int>());
    }
    put(facts, "traits.sizeof", size_of::<u32>());
}

fn shared_layouts(facts: &mut Facts) {
    extensible!(facts, "ApiVersion", ApiVersion { major_version, minor_version });
    extensible!(facts, "ErrorCreateArgs", ErrorCreateArgs { message, errc });
    extensible!(facts, "ErrorDestroyArgs", ErrorDestroyArgs { error });
    extensible!(facts, "Buffer", Buffer { dtype, data, rank, dims });
    plain!(facts, "ByteSpan", ByteSpan { ptr, len });
    plain!(facts, "Scalar", Scalar { dtype, value });
    plain!(facts, "Array", Array { dtype, size, data });
    extensible!(facts, "Args", Tensors { size, types, items });
    extensible!(facts, "Rets", Tensors { size, types, items });
    extensible!(facts, "Attrs", Attrs { size, types, names, attrs });
    extensible!(facts, "CallFrame", CallFrame { api, ctx, stage, args, rets, attrs, future });
    plain!(facts, "TypeId", TypeId { type_id });
    reported!(facts, "ExtensionBase", ExtensionBase { kind, next });
    plain!(facts, "MetadataExtension", MetadataExtension { extension_base, metadata });
    put(facts, "MetadataExtension.STRUCT_SIZE", ffi::MetadataExtension::STRUCT_SIZE);
    extensible!(facts, "StreamGetArgs", StreamGetArgs { ctx, stream });
    extensible!(facts, "DeviceOrdinalGetArgs", DeviceOrdinalGetArgs { ctx, device_ordinal });
    extensible!(facts, "ThreadPoolScheduleArgs", ThreadPoolScheduleArgs { ctx, task, data });
    extensible!(facts, "ThreadPoolNumThreadsArgs", ThreadPoolNumThreadsArgs { ctx, num_threads });
}

fn versioned_layouts(facts: &mut Facts, minor: i64) {
    if minor >= 4 {
        extensible!(facts, "ErrorGetMessageArgs", ErrorGetDetailsArgs4 { error, message, errc });
    } else {
        extensible!(facts, "ErrorGetMessageArgs", ErrorGetMessageArgs1 { error, message });
    }

    plain!(facts, "HandlerBundle", HandlerBundle { instantiate, prepare, initialize, execute });
    if minor >= 4 {
        extensible!(facts, "HandlerRegisterArgs", HandlerRegisterArgs4 { name, platform, bundle, record, traits });
        // The bundle of these versions ends with the stage that we keep behind it.
        facts.remove("HandlerBundle.sizeof");
    } else {
        extensible!(facts, "HandlerRegisterArgs", HandlerRegisterArgs { name, platform, bundle, traits });
    }

    if minor >= 2 {
        extensible!(facts, "TypeInfo", TypeInfo { deleter });
        extensible!(facts, "TypeRegisterArgs", TypeRegisterArgs2 { name, type_id, type_info });
    } else {
        extensible!(facts, "TypeRegisterArgs", TypeRegisterArgs1 { name, type_id });
    }

    match minor {
        1 => {
            extensible!(facts, "StateSetArgs", StateSetArgs1 { ctx, type_id, state, deleter });
        }
        2 => {
            extensible!(facts, "StateSetArgs", StateSetArgs2 { ctx, type_id, state });
        }
        _ => {
            extensible!(facts, "StateSetArgs", StateSetArgs3 { ctx, stage, type_id, state });
        }
    }
    if minor >= 3 {
        extensible!(facts, "StateGetArgs", StateGetArgs3 { ctx, stage, type_id, state });
    } else {
        extensible!(facts, "StateGetArgs", StateGetArgs1 { ctx, type_id, state });
    }

    reported!(facts, "Metadata", Metadata { api_version, traits, state_type_id });
    if minor < 2 {
        // We have one definition for all versions and leave its last field alone there.
        let end = facts.remove("Metadata.state_type_id").unwrap();
        facts.insert("Metadata.sizeof".to_owned(), end);
    }
}

fn api_table(facts: &mut Facts, minor: i64) {
    extensible!(
        facts,
        "Api",
        Api {
            api_version,
            internal_api,
            error_create,
            error_get_message,
            error_destroy,
            handler_register,
            stream_get,
            type_register,
            execution_context_get,
            state_set,
            state_get,
            device_memory_allocate,
            device_memory_free,
            thread_pool_schedule,
            thread_pool_num_threads,
            future_create,
            future_set_available,
            future_set_error,
            run_id_get,
            device_ordinal_get,
            find_extension,
            custom_options_get,
        }
    );
    // Older tables are ours cut off before the first slot that they have not.
    for (slot, since) in [("Api.custom_options_get", 5), ("Api.find_extension", 4)] {
        if minor < since {
            let end = facts.remove(slot).unwrap();
            facts.insert("Api.sizeof".to_owned(), end);
            facts.insert("Api.STRUCT_SIZE".to_owned(), end);
        }
    }
}

/// What we hold to be true of a minor version.
fn ours(minor: i64) -> Facts {
    let mut facts = Facts::new();
    constants(&mut facts, minor);
    shared_layouts(&mut facts);
    versioned_layouts(&mut facts, minor);
    api_table(&mut facts, minor);
    facts
}

/// What a compiler made of a header.
fn theirs(dump: &Path) -> Facts {
    let mut facts = Facts::new();
    for line in std::fs::read_to_string(dump).unwrap().lines() {
        let (name, value) = line.split_once(' ').unwrap();
        put(&mut facts, name, value.parse::<i64>().unwrap());
    }
    facts
}

#[test]
fn every_size_offset_and_value_equals_the_headers_of_real_wheels() {
    let folder = std::env::var_os("OEQ_TEST_ABI")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/test-cache/abi"), PathBuf::from);
    let entries = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}; run tests/abi/fetch.sh first", folder.display()));

    let (mut seen, mut differences) = (BTreeSet::new(), Vec::new());
    for entry in entries {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "txt") {
            continue;
        }
        let theirs = theirs(&path);
        let minor = theirs["API_MINOR"];
        seen.insert(minor);
        let ours = ours(minor);
        for name in theirs.keys().chain(ours.keys()).collect::<BTreeSet<_>>() {
            let (header, here) = (theirs.get(name), ours.get(name));
            if header != here {
                let version = path.file_stem().unwrap().to_string_lossy();
                differences.push(format!("jaxlib {version}: {name} is {header:?} in the header and {here:?} here"));
            }
        }
        assert!(theirs.len() > 150, "{} was cut short", path.display());
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    let known = (1..=i64::from(ffi::API_MINOR_NEWEST)).collect::<BTreeSet<_>>();
    assert_eq!(seen, known, "the headers in {} are not of every version that is supported", folder.display());
}
