//! Which entry points of a payload are compiled together.
//!
//! A payload holds the kernels of every derivative order, and their compile times add up. Cut into one unit per launch,
//! with the fix-up that follows it, the units compile side by side, and those that no target of the model calls never
//! compile at all. Cutting changes nothing in the machine code of what is kept (`tests/machine_code.py` proves it on real
//! payloads). A source that the cut does not understand is compiled whole.

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::config::CompileUnits;
use crate::layout::{Family, Launch};
use crate::payload::KernelPlan;
use crate::source;

/// A unit's index within its payload's [`Cut`].
pub type UnitIndex = usize;

/// One entry point of a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitEntry {
    /// Entry point.
    pub name: &'static str,
    /// Dynamic shared memory that its launches ask for, bytes.
    pub shared_bytes: u32,
}

/// Entry points that are compiled and loaded together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    /// The entry points.
    pub entries: SmallVec<[UnitEntry; 2]>,
    /// Relative compile time.
    pub cost: u32,
}

/// How a payload is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// The units.
    pub units: SmallVec<[Unit; 4]>,
    whole: bool,
}

/// The entry points of a launch, as the payload needs them.
fn entries_of(launch: &Launch, plan: &KernelPlan) -> SmallVec<[UnitEntry; 2]> {
    let mut entries = SmallVec::new();
    entries.push(UnitEntry { name: launch.entry, shared_bytes: launch.size.of(plan).shared_bytes });
    if let Some(fixup) = launch.fixup.as_ref().filter(|_| plan.deterministic) {
        entries.push(UnitEntry { name: fixup.entry, shared_bytes: 0 });
    }
    entries
}

impl Cut {
    /// Decides how to cut a payload.
    #[must_use]
    pub fn of(family: &Family, plan: &KernelPlan, policy: CompileUnits) -> Self {
        let mut units: SmallVec<[Unit; 4]> = SmallVec::new();
        for launch in family.calls.iter().flat_map(|call| call.launches) {
            let entries = entries_of(launch, plan);
            if !units.iter().any(|unit| unit.entries == entries) {
                units.push(Unit { entries, cost: launch.cost });
            }
        }
        let familiar = || {
            let Some(first) = units.first() else { return false };
            let keep: SmallVec<[&str; 2]> = first.entries.iter().map(|entry| entry.name).collect();
            source::can_keep_only(&plan.source, &keep)
        };
        if policy == CompileUnits::Split && units.len() > 1 && familiar() {
            return Self { units, whole: false };
        }
        let mut whole = Unit { entries: SmallVec::new(), cost: units.iter().map(|unit| unit.cost).sum() };
        for entry in units.iter().flat_map(|unit| &unit.entries) {
            match whole.entries.iter_mut().find(|known| known.name == entry.name) {
                Some(known) => known.shared_bytes = known.shared_bytes.max(entry.shared_bytes),
                None => whole.entries.push(*entry),
            }
        }
        Self { units: SmallVec::from_iter([whole]), whole: true }
    }

    /// The unit that holds a launch.
    #[must_use]
    pub fn unit_of(&self, launch: &Launch, plan: &KernelPlan) -> UnitIndex {
        if self.whole {
            return 0;
        }
        let entries = entries_of(launch, plan);
        self.units.iter().position(|unit| unit.entries == entries).unwrap_or(0)
    }

    /// The program text of a unit.
    #[must_use]
    pub fn text<'a>(&self, unit: &Unit, plan: &'a KernelPlan) -> Cow<'a, str> {
        if self.whole {
            return Cow::Borrowed(&plan.source);
        }
        let keep: SmallVec<[&str; 2]> = unit.entries.iter().map(|entry| entry.name).collect();
        // A unit that cannot be cut out by itself is the whole program with more than is needed.
        source::keep_only(&plan.source, &keep).map_or(Cow::Borrowed(plan.source.as_str()), Cow::Owned)
    }
}
