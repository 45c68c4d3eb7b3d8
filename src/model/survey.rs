//! What a model's calls mean to this crate: which go to our targets, which kernels they name, and what is wrong with any.

use std::collections::HashMap;
use std::sync::Arc;

use super::{Attribute, CustomCall, Members, Model, ValueType, member};
use crate::error::{Error, Result};
use crate::layout::{Family, TensorView, check};
use crate::payload::{DictionaryPayload, Dtype, KernelPlan};
use crate::registry::{Derivative, Descriptor, table};

/// The calls and kernels of one model.
#[derive(Debug)]
#[non_exhaustive]
pub struct Survey {
    /// Calls of our targets, in the model's order.
    pub sites: Vec<Site>,
    /// Every kernel once: equal are those of one family with one whole payload.
    pub kernels: Vec<Kernel>,
    /// Indices in [`Model::calls`] of the calls that go elsewhere.
    pub others: Vec<usize>,
    /// Bytes of all payloads, each once.
    pub unique_bytes: u64,
    /// Bytes of all payloads, as often as a call site names them.
    pub referenced_bytes: u64,
}

/// One call of a target of ours.
#[derive(Debug)]
#[non_exhaustive]
pub struct Site {
    /// Its index in [`Model::calls`].
    pub call: usize,
    /// The target.
    pub target: &'static Descriptor,
    /// The derivative order, an index into [`Family::calls`], and the index of the kernel in [`Survey::kernels`]; or why
    /// the attributes do not tell.
    pub meaning: Result<(usize, usize)>,
    /// What is wrong with the call's tensors, as the runtime would say it. A call with a dimension that is not known yet
    /// is not checked.
    pub problem: Option<Error>,
}

/// One kernel.
#[derive(Debug)]
#[non_exhaustive]
pub struct Kernel {
    /// Its family.
    pub family: &'static Family,
    /// What it is equal by: the payload as it came, or the encoding of a payload in dictionaries.
    pub identity: Arc<[u8]>,
    /// How large the payload is: its JSON text, or the source and every member of the dictionaries.
    pub bytes: usize,
    /// Whether the payload is a source with dictionaries beside it, the form of OEQ 0.5.0 to 0.5.3.
    pub dictionaries: bool,
    /// The attribute `hash` of its first call.
    pub hash: Option<i64>,
    /// What the payload says, or why it cannot be.
    pub plan: Result<KernelPlan>,
}

/// Looks through a model.
///
/// # Errors
/// The table of targets cannot be built. What is wrong with a call or a kernel is in the survey.
pub fn survey(model: &Model) -> Result<Survey> {
    let table = table()?;
    let mut survey =
        Survey { sites: Vec::new(), kernels: Vec::new(), others: Vec::new(), unique_bytes: 0, referenced_bytes: 0 };
    let mut kernels = Kernels::default();
    for (index, call) in model.calls.iter().enumerate() {
        let Some(target) = table.find(&call.target) else {
            survey.others.push(index);
            continue;
        };
        let meaning = order(target, call).and_then(|order| Ok((order, kernels.of(target.family, &call.attributes)?)));
        let mut problem = None;
        if let Ok((order, kernel)) = meaning {
            let kernel = &kernels.list[kernel];
            survey.referenced_bytes =
                survey.referenced_bytes.saturating_add(call.sites.saturating_mul(kernel.bytes as u64));
            problem = kernel.plan.as_ref().ok().and_then(|plan| tensors(target.family, order, plan, call).err());
        }
        survey.sites.push(Site { call: index, target, meaning, problem });
    }
    for payload in &model.payloads {
        kernels.alone(payload)?;
    }
    survey.kernels = kernels.list;
    survey.unique_bytes = survey.kernels.iter().map(|kernel| kernel.bytes as u64).sum();
    Ok(survey)
}

/// The derivative order of a call.
fn order(target: &Descriptor, call: &CustomCall) -> Result<usize> {
    let orders = target.family.calls.len();
    match (target.derivative, call.attribute("derivative")) {
        (Derivative::Order(order), _) => Ok(order),
        (Derivative::Attribute, Some(&Attribute::Int(order))) => {
            usize::try_from(order).ok().filter(|order| *order < orders).ok_or_else(|| {
                Error::invalid(format!("attribute `derivative` is {order}; expected 0 to {}", orders.saturating_sub(1)))
            })
        }
        (Derivative::Attribute, _) => {
            Err(Error::invalid(format!("no integer attribute `derivative`, which `{}` needs", target.name)))
        }
    }
}

/// The kernels seen so far.
#[derive(Default)]
struct Kernels {
    list: Vec<Kernel>,
    /// By family and payload.
    known: HashMap<(&'static str, Arc<[u8]>), usize>,
    /// By family and the address of the payload's text, or of the attributes if it is in dictionaries. Calls share both, so
    /// a large payload that many calls name is looked at once.
    seen: HashMap<(&'static str, usize), usize>,
}

impl Kernels {
    fn of(&mut self, family: &'static Family, attributes: &Members) -> Result<usize> {
        let Some(Attribute::Text(kernel)) = member(attributes, "kernel") else {
            return Err(Error::invalid("no text attribute `kernel`, which holds the payload"));
        };
        let dictionaries = matches!(member(attributes, "kernel_prop"), Some(Attribute::Dictionary(_)));
        let place = if dictionaries { Arc::as_ptr(attributes).cast() } else { Arc::as_ptr(kernel).cast::<u8>() };
        let address = (family.name, place as usize);
        if let Some(&index) = self.seen.get(&address) {
            return Ok(index);
        }
        let hash = match member(attributes, "hash") {
            Some(&Attribute::Int(hash)) => Some(hash),
            _ => None,
        };
        let index = if dictionaries {
            let lists = ["forward_config", "backward_config", "double_backward_config", "kernel_prop"]
                .map(|name| integers(attributes, name));
            let [forward, backward, double_backward, properties] = lists;
            let (forward, backward, double_backward, properties) = (forward?, backward?, double_backward?, properties?);
            let payload = DictionaryPayload {
                source: kernel,
                forward_config: &forward,
                backward_config: &backward,
                double_backward_config: &double_backward,
                kernel_prop: &properties,
            };
            let members = [&forward, &backward, &double_backward, &properties].into_iter().flatten();
            let bytes = members.fold(kernel.len(), |bytes, (name, _)| bytes + name.len() + size_of::<i64>());
            let plan = || KernelPlan::from_dictionaries(&payload, &family.requirements);
            self.add(family, payload.identity_bytes().into(), (bytes, true), hash, plan)
        } else {
            let plan = || KernelPlan::from_json(kernel, &family.requirements);
            self.add(family, Arc::clone(kernel), (kernel.len(), false), hash, plan)
        };
        self.seen.insert(address, index);
        Ok(index)
    }

    fn add(
        &mut self,
        family: &'static Family,
        identity: Arc<[u8]>,
        (bytes, dictionaries): (usize, bool),
        hash: Option<i64>,
        plan: impl FnOnce() -> Result<KernelPlan>,
    ) -> usize {
        let Self { list, known, .. } = self;
        *known.entry((family.name, Arc::clone(&identity))).or_insert_with(|| {
            list.push(Kernel { family, identity, bytes, dictionaries, hash, plan: plan() });
            list.len() - 1
        })
    }

    /// A payload without a call. Nothing names its family, so it is the most demanding one that accepts it; a payload that
    /// none accepts counts for the most demanding one whose own entry points it speaks of.
    fn alone(&mut self, payload: &Arc<[u8]>) -> Result<()> {
        let mut families: Vec<&'static Family> = Vec::new();
        for family in table()?.entries.iter().map(|entry| entry.descriptor.family) {
            if !families.iter().any(|known| known.name == family.name) {
                families.push(family);
            }
        }
        families.sort_by_key(|family| std::cmp::Reverse(family.requirements.entry_points.len()));
        let mut plans: Vec<_> =
            families.into_iter().map(|family| (family, KernelPlan::from_json(payload, &family.requirements))).collect();
        let shared = plans.last().map_or(&[][..], |(family, _)| family.requirements.entry_points);
        let speaks = |family: &Family| {
            let own = family.requirements.entry_points.iter().filter(|entry| !shared.contains(entry));
            own.into_iter().any(|own| payload.windows(own.name.len()).any(|text| text == own.name.as_bytes()))
        };
        let chosen = plans
            .iter()
            .position(|(_, plan)| plan.is_ok())
            .or_else(|| plans.iter().position(|(family, _)| speaks(family)))
            .unwrap_or(plans.len().saturating_sub(1));
        if chosen < plans.len() {
            let (family, plan) = plans.swap_remove(chosen);
            self.add(family, Arc::clone(payload), (payload.len(), false), None, || plan);
        }
        Ok(())
    }
}

/// A dictionary of integers.
fn integers<'a>(attributes: &'a Members, name: &str) -> Result<Vec<(&'a str, i64)>> {
    let Some(Attribute::Dictionary(members)) = member(attributes, name) else {
        return Err(Error::invalid(format!("no dictionary attribute `{name}`")));
    };
    let pair = |(key, value): &'a (Arc<str>, Attribute)| match value {
        Attribute::Int(value) => Ok((&**key, *value)),
        _ => Err(Error::invalid(format!("member `{key}` of attribute `{name}` is no integer"))),
    };
    members.iter().map(pair).collect()
}

/// Checks a call's tensors as the runtime will.
fn tensors(family: &Family, order: usize, plan: &KernelPlan, call: &CustomCall) -> Result<()> {
    let (Some(operands), Some(results)) = (shapes(&call.operands), shapes(&call.results)) else { return Ok(()) };
    let Some(layout) = family.calls.get(order) else { return Ok(()) };
    check(layout, plan, &views(&operands), &views(&results)).map(|_| ())
}

type Shape = (std::result::Result<Dtype, i32>, Vec<i64>);

/// Element types and dimensions; `None` if one is not known.
fn shapes(types: &[Arc<ValueType>]) -> Option<Vec<Shape>> {
    let shape = |one: &Arc<ValueType>| match &**one {
        ValueType::Tensor { dtype, dims } => {
            let dims: Option<Vec<i64>> = dims.iter().map(|dim| i64::try_from((*dim)?).ok()).collect();
            let known = [("f32", Dtype::F32), ("f64", Dtype::F64), ("i32", Dtype::I32), ("i64", Dtype::I64)];
            let dtype = known.iter().chain(&[("ui8", Dtype::U8)]).find(|(name, _)| *name == &**dtype);
            Some((dtype.map(|&(_, dtype)| dtype).ok_or(-1), dims?))
        }
        ValueType::Other(_) => None,
    };
    types.iter().map(shape).collect()
}

fn views(shapes: &[Shape]) -> Vec<TensorView<'_>> {
    shapes.iter().map(|(dtype, dimensions)| TensorView { dtype: *dtype, dimensions }).collect()
}
