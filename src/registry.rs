//! Targets, and the table that is derived from them.
//!
//! A [`Target`] submits itself with [`submit_targets!`](crate::submit_targets); `inventory` collects the submissions when
//! the program starts. Nothing else lists targets: the C table, the registration in an XLA and the tool all read
//! [`table`].
//!
//! Static archives have a trap. A linker takes an object out of an archive only when something refers to it, and a
//! submission is nothing but a constructor that nobody refers to: in a debug build, whose objects are small, every one of
//! them can vanish without a word. So each group of targets also has an [`Anchor`], an ordinary static that holds the very
//! same descriptors. The crate's own anchors are referenced from here, which keeps the objects, and a target that is found
//! in an anchor but was not collected is added from it. Another crate whose object might be dropped names its own anchor
//! in [`require`].

use std::any::TypeId;
use std::ffi::CString;
use std::sync::{Mutex, OnceLock};

use crate::error::{Code, Error, Result};
use crate::layout::Family;
use crate::sync::lock;
#[cfg(feature = "host")]
use crate::xla::host;
use crate::xla::register::Platform;
use crate::xla::{ffi, stages, stateless};

/// One custom call target: a name, a family and the derivative order.
///
/// A target has no value; its stage functions are monomorphised from the type.
pub trait Target: 'static {
    /// The name in `stablehlo.custom_call`, without NUL.
    const NAME: &'static str;
    /// The family whose payloads it reads.
    const FAMILY: &'static Family;
    /// Which of the family's calls it makes.
    const DERIVATIVE: Derivative;
}

/// The order of derivative that a target computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Derivative {
    /// Always this one: an index into [`Family::calls`].
    Order(usize),
    /// The i64 attribute `derivative` of each call site says.
    Attribute,
}

/// A target as a value: what the table holds.
#[derive(Debug, Clone, Copy)]
pub struct Descriptor {
    /// The target's name.
    pub name: &'static str,
    /// Its family.
    pub family: &'static Family,
    /// Its order.
    pub derivative: Derivative,
    /// Its stage functions.
    pub bundle: ffi::HandlerBundle,
    /// Its execute function for hosts that register no other stage.
    pub stateless: ffi::Handler,
    /// Its stage functions on the host platform.
    #[cfg(feature = "host")]
    pub host_bundle: ffi::HandlerBundle,
    /// `XLA_FFI_HANDLER_TRAITS_*` bits.
    pub traits: u32,
    /// Identity of the target's type.
    type_id: fn() -> TypeId,
}

impl Descriptor {
    /// The descriptor of a target type.
    #[must_use]
    pub const fn of<T: Target>() -> Self {
        Self {
            name: T::NAME,
            family: T::FAMILY,
            derivative: T::DERIVATIVE,
            bundle: ffi::HandlerBundle {
                instantiate: Some(stages::instantiate::<T>),
                prepare: None,
                initialize: Some(stages::initialize::<T>),
                execute: Some(stages::execute::<T>),
            },
            stateless: stateless::execute::<T>,
            #[cfg(feature = "host")]
            host_bundle: ffi::HandlerBundle {
                instantiate: Some(host::instantiate::<T>),
                prepare: None,
                initialize: None,
                execute: Some(host::execute::<T>),
            },
            traits: ffi::TRAIT_COMMAND_BUFFER_COMPATIBLE,
            type_id: TypeId::of::<T>,
        }
    }

    /// Its stage functions on a platform.
    ///
    /// # Errors
    /// The library was built without the platform.
    pub fn bundle_on(&self, platform: Platform) -> Result<ffi::HandlerBundle> {
        match platform {
            Platform::Cuda => Ok(self.bundle),
            #[cfg(feature = "host")]
            Platform::Host => Ok(self.host_bundle),
            #[cfg(not(feature = "host"))]
            Platform::Host => Err(Error::new(
                Code::Unimplemented,
                "this library was built without the host platform (the crate's feature `host`)",
            )),
        }
    }

    /// Its execute function on a platform for hosts that register no other stage.
    ///
    /// # Errors
    /// See [`Self::bundle_on`].
    pub fn stateless_on(&self, platform: Platform) -> Result<ffi::Handler> {
        match platform {
            Platform::Cuda => Ok(self.stateless),
            // There a call without state is the same function's.
            Platform::Host => self.bundle_on(platform)?.execute.ok_or_else(|| Error::internal("no execute stage")),
        }
    }

    /// Names of the stages that it has.
    pub fn stages(&self) -> impl Iterator<Item = &'static str> + use<> {
        let bundle = self.bundle;
        [
            ("instantiate", bundle.instantiate),
            ("prepare", bundle.prepare),
            ("initialize", bundle.initialize),
            ("execute", bundle.execute),
        ]
        .into_iter()
        .filter_map(|(name, function)| function.map(|_| name))
    }
}

/// What `inventory` collects.
#[derive(Debug)]
pub struct Submission(pub &'static Descriptor);

inventory::collect!(Submission);

/// The descriptors of one [`submit_targets!`](crate::submit_targets), as an ordinary static that a reference can keep.
#[derive(Debug)]
pub struct Anchor {
    /// The targets submitted together.
    pub targets: &'static [&'static Descriptor],
}

/// Submits target types and defines an [`Anchor`] that holds them.
///
/// ```
/// # use oeq_native::registry::{Derivative, Target};
/// # use oeq_native::layout::Family;
/// pub struct Again;
/// impl Target for Again {
///     const NAME: &'static str = "another_tensor_product";
///     const FAMILY: &'static Family = &oeq_native::targets::tensor_product::FAMILY;
///     const DERIVATIVE: Derivative = Derivative::Order(0);
/// }
/// oeq_native::submit_targets!(pub ANCHOR = [Again]);
/// # assert!(oeq_native::registry::table().unwrap().find("another_tensor_product").is_some());
/// ```
#[macro_export]
macro_rules! submit_targets {
    ($visibility:vis $anchor:ident = [$($target:ty),+ $(,)?]) => {
        /// Keeps the targets submitted in this module; see `oeq_native::registry`.
        $visibility static $anchor: $crate::registry::Anchor = $crate::registry::Anchor {
            targets: &[$(const { &$crate::registry::Descriptor::of::<$target>() }),+],
        };
        $($crate::__private::inventory::submit! {
            $crate::registry::Submission(const { &$crate::registry::Descriptor::of::<$target>() })
        })+
    };
}

/// One row of the table, with the name as C wants it.
#[derive(Debug)]
pub struct Entry {
    /// The target.
    pub descriptor: &'static Descriptor,
    /// Its name, NUL-terminated.
    pub c_name: CString,
}

/// Every target, sorted by name; addresses are stable for the life of the process.
#[derive(Debug)]
pub struct Table {
    /// The rows.
    pub entries: Vec<Entry>,
    /// Targets that the linker dropped from the collection and an anchor brought back.
    pub recovered: usize,
}

impl Table {
    /// The target of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&'static Descriptor> {
        let found = self.entries.binary_search_by(|entry| entry.descriptor.name.cmp(name)).ok()?;
        Some(self.entries[found].descriptor)
    }
}

static REQUIRED: Mutex<Vec<&'static Anchor>> = Mutex::new(Vec::new());
static TABLE: OnceLock<Result<Table>> = OnceLock::new();

/// Makes sure that the targets of another crate are in the table, also where a static link would drop them.
///
/// # Errors
/// The table was built already, without these targets.
pub fn require(anchor: &'static Anchor) -> Result<()> {
    let mut required = lock(&REQUIRED);
    let Some(built) = TABLE.get() else {
        required.push(anchor);
        return Ok(());
    };
    let table = built.as_ref().map_err(Clone::clone)?;
    match anchor.targets.iter().find(|target| table.find(target.name).is_none()) {
        None => Ok(()),
        Some(target) => Err(Error::precondition(format!(
            "target `{}` was required after the handler table had been built; require it before the first registration",
            target.name
        ))),
    }
}

/// The table of all targets, built at the first call.
///
/// # Errors
/// Two different targets of one name, or a name with a NUL byte; the same error every time.
pub fn table() -> Result<&'static Table> {
    TABLE
        .get_or_init(|| {
            let required = lock(&REQUIRED);
            let anchors = crate::targets::ANCHORS.iter().chain(required.iter());
            build(inventory::iter::<Submission>().map(|s| s.0), anchors.flat_map(|anchor| anchor.targets).copied())
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// Two values describe one target when they come from one type: the compiler may copy constants.
fn same(a: &Descriptor, b: &Descriptor) -> bool {
    std::ptr::eq(a, b) || (a.type_id)() == (b.type_id)()
}

fn build(
    collected: impl Iterator<Item = &'static Descriptor>,
    anchored: impl Iterator<Item = &'static Descriptor>,
) -> Result<Table> {
    let mut all: Vec<&'static Descriptor> = collected.collect();
    let collected = all.len();
    for target in anchored {
        if !all[..].iter().any(|found| same(found, target)) {
            all.push(target);
        }
    }
    let recovered = all.len() - collected;
    all.sort_by_key(|target| target.name);
    if let Some(pair) = all.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(Error::new(
            Code::AlreadyExists,
            format!(
                "two targets are named `{}` (families `{}` and `{}`); target names must be unique in a program",
                pair[0].name, pair[0].family.name, pair[1].family.name
            ),
        ));
    }
    let entries = all
        .into_iter()
        .map(|descriptor| {
            let c_name = CString::new(descriptor.name)
                .map_err(|_| Error::invalid(format!("target name {:?} contains a NUL byte", descriptor.name)))?;
            Ok(Entry { descriptor, c_name })
        })
        .collect::<Result<_>>()?;
    Ok(Table { entries, recovered })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed test should panic")]

    use super::*;
    use crate::targets::{convolution, tensor_product, variadic};

    struct Impostor;
    impl Target for Impostor {
        const NAME: &'static str = "tp_forward";
        const FAMILY: &'static Family = &convolution::FAMILY;
        const DERIVATIVE: Derivative = Derivative::Order(0);
    }

    fn own() -> impl Iterator<Item = &'static Descriptor> {
        [&tensor_product::ANCHOR, &convolution::ANCHOR, &variadic::ANCHOR].into_iter().flat_map(|a| a.targets).copied()
    }

    #[test]
    fn the_table_is_sorted_and_whole() {
        let names: Vec<_> = table().unwrap().entries.iter().map(|e| e.descriptor.name).collect();
        assert_eq!(
            names,
            [
                "conv_backward",
                "conv_double_backward",
                "conv_forward",
                "oeq_convolution",
                "oeq_tensor_product",
                "tp_backward",
                "tp_double_backward",
                "tp_forward"
            ]
        );
        assert_eq!(table().unwrap().recovered, 0);
    }

    #[test]
    fn what_the_linker_dropped_comes_back_from_the_anchors() {
        let built = build(own().take(2), own()).unwrap();
        assert_eq!((built.entries.len(), built.recovered), (8, 6));
        assert_eq!(build(std::iter::empty(), own()).unwrap().recovered, 8);
    }

    #[test]
    fn two_targets_of_one_name_are_an_error_that_names_both_families() {
        static IMPOSTOR: Descriptor = Descriptor::of::<Impostor>();
        let error = build(own().chain([&IMPOSTOR]), own()).unwrap_err();
        assert_eq!(error.code(), Code::AlreadyExists);
        assert!(error.message().contains("`tp_forward`"), "{error}");
        assert!(error.message().contains("convolution") && error.message().contains("tensor_product"), "{error}");
    }

    #[test]
    fn requiring_after_the_table_is_built_only_works_for_what_is_in_it() {
        static LATE: Anchor = Anchor { targets: &[const { &Descriptor::of::<Late>() }] };
        struct Late;
        impl Target for Late {
            const NAME: &'static str = "too_late";
            const FAMILY: &'static Family = &convolution::FAMILY;
            const DERIVATIVE: Derivative = Derivative::Order(0);
        }
        table().unwrap();
        require(&convolution::ANCHOR).unwrap();
        assert!(require(&LATE).unwrap_err().message().contains("too_late"));
    }
}
