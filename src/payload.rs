//! What a custom call says about its kernel: from the attributes of an exported model to one validated plan.
//!
//! Models carry a payload in one of two forms, both of which must keep working: JSON text, or the source as a string
//! with four dictionaries of integers beside it. Both end in the same [`KernelPlan`], after the same checks. Payloads
//! come from files, so nothing in here trusts them: every known member is checked for presence, type and range, and
//! an error names the member, what was found and what is allowed. Unknown members are ignored, whatever they hold;
//! they still belong to a payload's identity (see [`DictionaryPayload::identity_bytes`]).
//!
//! Parsing takes time linear in the payload and does not recurse. There is no I/O and no unsafe code here.

use std::fmt;

use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, Result};
use crate::source;

/// The largest payload that is accepted, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;

/// The largest dimension, weight count and workspace that is accepted: a product of one of them with the size of an
/// element and the rows of any tensor that fits in memory stays far below 2^64.
const MAX_DIM: i64 = 1 << 40;

/// The largest dynamic shared memory of a launch that is accepted, in bytes. Devices have less; what one of them
/// offers is compared when a kernel is loaded on it.
const MAX_SHARED_BYTES: i64 = 1 << 20;

/// CUDA's limit for the first dimension of a grid.
const MAX_BLOCKS: i64 = (1 << 31) - 1;

/// CUDA's limit for the threads of a block.
const MAX_THREADS: i64 = 1024;

/// The only warp size of CUDA devices.
const WARP_SIZE: i64 = 32;

/// How much of a payload an error quotes at most, in characters.
const MAX_QUOTE: usize = 60;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// 32-bit float, code 1.
    F32,
    /// 64-bit float, code 2.
    F64,
    /// 32-bit signed integer, code 3.
    I32,
    /// 64-bit signed integer, code 4.
    I64,
    /// 8-bit unsigned integer, code 5.
    U8,
}

impl Dtype {
    /// The size of one element in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
            Self::U8 => 1,
        }
    }

    /// The type's name, for example `f32`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F64 => "f64",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
        }
    }

    /// The type that a payload means by a code, or `None` if no type has that code.
    #[must_use]
    pub const fn from_code(code: i64) -> Option<Self> {
        match code {
            1 => Some(Self::F32),
            2 => Some(Self::F64),
            3 => Some(Self::I32),
            4 => Some(Self::I64),
            5 => Some(Self::U8),
            _ => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The size of a kernel launch. Grids and blocks have one dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LaunchSize {
    /// Blocks of the grid, from 1 to 2^31 - 1.
    pub blocks: u32,
    /// Threads of a block: a multiple of 32, from 32 to 1024.
    pub threads: u32,
    /// Always 32.
    pub warp_size: u32,
    /// Dynamic shared memory of a block in bytes, at most 1 MiB.
    pub shared_bytes: u32,
}

/// What a kernel family demands of a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Requirements {
    /// The entry points that the source must define.
    pub entry_points: &'static [EntryPoint],
    /// The family is a convolution: index type, workspace and `deterministic` mean something.
    pub convolution: bool,
}

/// An entry point that a kernel family launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EntryPoint {
    /// Its name in the source.
    pub name: &'static str,
    /// It is launched only by deterministic kernels, so only their sources must define it.
    pub deterministic_only: bool,
}

/// A validated payload: everything that compiling and launching a kernel takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelPlan {
    /// The CUDA C++ source: not empty, without NUL characters, and defining the family's entry points.
    pub source: String,
    /// The launch of `forward` and `double_backward_A`.
    pub forward: LaunchSize,
    /// The launch of `backward`.
    pub backward: LaunchSize,
    /// The launch of `double_backward_B`.
    pub double_backward: LaunchSize,
    /// Elements in a row of the first operand. This and the next three are positive and at most 2^40.
    pub l1_dim: u64,
    /// Elements in a row of the second operand.
    pub l2_dim: u64,
    /// Elements in a row of the result.
    pub l3_dim: u64,
    /// Weights of one row, or of all rows if they are shared.
    pub weight_numel: u64,
    /// All rows use the same weights.
    pub shared_weights: bool,
    /// [`Dtype::F32`] or [`Dtype::F64`].
    pub irrep_dtype: Dtype,
    /// [`Dtype::F32`] or [`Dtype::F64`].
    pub weight_dtype: Dtype,
    /// Scratch memory that a launch needs, in bytes, at most 2^40. Positive for deterministic convolutions, 0 for
    /// tensor products.
    pub workspace_bytes: u64,
    /// A convolution sums into the workspace and has fix-up kernels run afterwards. False for tensor products.
    pub deterministic: bool,
    /// [`Dtype::I32`] or [`Dtype::I64`] for convolutions, `None` for tensor products.
    pub index_dtype: Option<Dtype>,
}

/// The older form of a payload, as the attributes come.
#[derive(Debug, Clone, Copy)]
pub struct DictionaryPayload<'a> {
    /// The attribute `kernel`: the CUDA C++ source.
    pub source: &'a [u8],
    /// The attribute of that name: pairs of member and value.
    pub forward_config: &'a [(&'a str, i64)],
    /// The attribute of that name.
    pub backward_config: &'a [(&'a str, i64)],
    /// The attribute of that name.
    pub double_backward_config: &'a [(&'a str, i64)],
    /// The attribute of that name.
    pub kernel_prop: &'a [(&'a str, i64)],
}

impl KernelPlan {
    /// Makes a plan from JSON text.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::error::Code::InvalidArgument) when the text is longer than
    /// [`MAX_PAYLOAD_BYTES`], is not one JSON object, or lacks something that `needs` demands; a known member must be
    /// there once, with the right type and in range.
    pub fn from_json(text: &[u8], needs: &Requirements) -> Result<Self> {
        check_length(text.len())?;
        // serde_json does not look at the encoding of what it skips.
        let text = utf8("the payload", text)?;
        let mut payload = Payload::new();
        let mut json = serde_json::Deserializer::from_str(text);
        Reader { path: Path::WHOLE, target: Target::Payload(&mut payload) }
            .deserialize(&mut json)
            .and_then(|()| json.end())
            .map_err(|error| {
                Error::invalid(match error.classify() {
                    serde_json::error::Category::Data => error.to_string(),
                    _ => format!("the payload is not one JSON object: {error}"),
                })
            })?;
        payload.plan(needs)
    }

    /// Makes a plan from a source and dictionaries.
    ///
    /// # Errors
    /// [`Code::InvalidArgument`](crate::error::Code::InvalidArgument) when source and names are together longer than
    /// [`MAX_PAYLOAD_BYTES`], or lack something that `needs` demands; a known member must be there once and in range.
    pub fn from_dictionaries(given: &DictionaryPayload<'_>, needs: &Requirements) -> Result<Self> {
        let names = given.dictionaries().into_iter().flatten().map(|(name, _)| name.len());
        check_length(names.fold(given.source.len(), usize::saturating_add))?;
        let mut payload = Payload::new();
        for (dictionary, pairs) in payload.dictionaries.iter_mut().zip(given.dictionaries()) {
            dictionary.present = true;
            for &(name, value) in pairs {
                if let Some(index) = dictionary.index_of(name) {
                    dictionary.insert(index, value).map_err(Error::invalid)?;
                }
            }
        }
        payload.source = Some(utf8("`kernel`", given.source)?.to_owned());
        payload.plan(needs)
    }
}

impl<'a> DictionaryPayload<'a> {
    /// An encoding of the whole payload: two payloads have the same one exactly if they have the same source and the
    /// same members with the same values, unknown ones included, in any order. It never equals a JSON text.
    #[must_use]
    pub fn identity_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.source.len() + 1024);
        // No JSON text begins with this.
        bytes.push(0);
        push_text(&mut bytes, self.source);
        for pairs in self.dictionaries() {
            let mut pairs = pairs.to_vec();
            pairs.sort_unstable();
            bytes.extend_from_slice(&(pairs.len() as u64).to_le_bytes());
            for (name, value) in pairs {
                push_text(&mut bytes, name.as_bytes());
                bytes.extend_from_slice(&value.to_le_bytes());
            }
        }
        bytes
    }

    /// In the order of [`DICTIONARIES`].
    fn dictionaries(&self) -> [&'a [(&'a str, i64)]; 4] {
        [self.forward_config, self.backward_config, self.double_backward_config, self.kernel_prop]
    }
}

fn push_text(bytes: &mut Vec<u8>, text: &[u8]) {
    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text);
}

fn check_length(length: usize) -> Result<()> {
    if length > MAX_PAYLOAD_BYTES {
        return Err(Error::invalid(format!(
            "the payload has {length} bytes, allowed are at most {MAX_PAYLOAD_BYTES} (16 MiB)"
        )));
    }
    Ok(())
}

fn utf8<'a>(what: &str, text: &'a [u8]) -> Result<&'a str> {
    std::str::from_utf8(text)
        .map_err(|error| Error::invalid(format!("{what} is not UTF-8 text: see byte {}", error.valid_up_to())))
}

/// The start of a text in quotation marks, short enough for an error.
fn quote(text: &str) -> String {
    let mut quoted = String::from("\"");
    let mut length = 0;
    for character in text.chars() {
        let escaped = character.escape_debug();
        length += escaped.len();
        if length > MAX_QUOTE {
            return quoted + "\"...";
        }
        quoted.extend(escaped);
    }
    quoted + "\""
}

/// The members of a launch configuration.
const LAUNCH: &[&str] = &["num_blocks", "num_threads", "warp_size", "smem"];

/// The members of `kernel_prop`. What is not here (`opt_level`) is not used.
const PROPERTIES: &[&str] = &[
    "L1_dim",
    "L2_dim",
    "L3_dim",
    "weight_numel",
    "shared_weights",
    "irrep_dtype",
    "weight_dtype",
    "workspace_size",
    "deterministic",
    "idx_dtype",
];

/// The dictionaries of a payload and their members.
const DICTIONARIES: [(&str, &[&str]); 4] = [
    ("forward_config", LAUNCH),
    ("backward_config", LAUNCH),
    ("double_backward_config", LAUNCH),
    ("kernel_prop", PROPERTIES),
];

/// A payload of either form, known members only, not yet checked.
struct Payload {
    source: Option<String>,
    dictionaries: [Dictionary; 4],
}

impl Payload {
    fn new() -> Self {
        let dictionaries = DICTIONARIES.map(|(name, members)| Dictionary {
            name,
            present: false,
            members,
            values: vec![None; members.len()],
        });
        Self { source: None, dictionaries }
    }

    fn plan(self, needs: &Requirements) -> Result<KernelPlan> {
        let source =
            self.source.ok_or_else(|| Error::invalid("`kernel` is missing, it must be the CUDA C++ source"))?;
        for dictionary in &self.dictionaries {
            if !dictionary.present {
                let members = dictionary.members.join(", ");
                let text = format!("`{}` is missing, it must be an object with {members}", dictionary.name);
                return Err(Error::invalid(text));
            }
        }
        let [forward, backward, double_backward, properties] = &self.dictionaries;
        let (forward, backward, double_backward) = (forward.launch()?, backward.launch()?, double_backward.launch()?);
        let dim = |member| properties.number(member, 1, MAX_DIM);
        let floats = [Dtype::F32, Dtype::F64];
        let deterministic = needs.convolution && properties.flag("deterministic")?;
        let plan = KernelPlan {
            forward,
            backward,
            double_backward,
            l1_dim: dim("L1_dim")?,
            l2_dim: dim("L2_dim")?,
            l3_dim: dim("L3_dim")?,
            weight_numel: dim("weight_numel")?,
            shared_weights: properties.flag("shared_weights")?,
            irrep_dtype: properties.dtype("irrep_dtype", floats)?,
            weight_dtype: properties.dtype("weight_dtype", floats)?,
            workspace_bytes: if needs.convolution {
                properties.number("workspace_size", i64::from(deterministic), MAX_DIM)?
            } else {
                0
            },
            deterministic,
            index_dtype: if needs.convolution {
                Some(properties.dtype("idx_dtype", [Dtype::I32, Dtype::I64])?)
            } else {
                None
            },
            source,
        };
        check_source(&plan, needs)?;
        Ok(plan)
    }
}

fn check_source(plan: &KernelPlan, needs: &Requirements) -> Result<()> {
    if plan.source.is_empty() {
        return Err(Error::invalid("`kernel` is empty, it must be the CUDA C++ source"));
    }
    if let Some(at) = plan.source.bytes().position(|byte| byte == 0) {
        return Err(Error::invalid(format!("`kernel` has a NUL character at byte {at}, a source must have none")));
    }
    let defined = source::entry_points(&plan.source).map_err(|error| error.context("`kernel`"))?;
    for entry in needs.entry_points.iter().filter(|entry| plan.deterministic || !entry.deterministic_only) {
        if !defined.iter().any(|found| found.name == entry.name) {
            let mut found = String::new();
            for span in &defined {
                if found.len() > MAX_QUOTE {
                    break;
                }
                found.push_str(if found.is_empty() { "" } else { ", " });
                found.push_str(&span.name);
            }
            let found = quote(&found);
            return Err(Error::invalid(format!(
                "`kernel`: the source must define the __global__ function `{}`, it defines {} such functions: {found}",
                entry.name,
                defined.len(),
            )));
        }
    }
    Ok(())
}

/// One dictionary of a payload: its known members and what came for them.
struct Dictionary {
    name: &'static str,
    present: bool,
    members: &'static [&'static str],
    values: Vec<Option<i64>>,
}

impl Dictionary {
    fn index_of(&self, member: &str) -> Option<usize> {
        self.members.iter().position(|&known| known == member)
    }

    fn path(&self, index: usize) -> Path {
        Path { dictionary: self.name, member: self.members.get(index).copied().unwrap_or_default() }
    }

    fn insert(&mut self, index: usize, value: i64) -> std::result::Result<(), String> {
        let path = self.path(index);
        match self.values.get_mut(index) {
            Some(place @ None) => {
                *place = Some(value);
                Ok(())
            }
            _ => Err(format!("{path} is there twice, it must be there once")),
        }
    }

    /// The value of a member, if `accept` accepts it. `allowed` completes "allowed ...".
    fn checked<T>(&self, member: &str, allowed: &str, accept: impl FnOnce(i64) -> Option<T>) -> Result<T> {
        let name = self.name;
        let Some(value) = self.index_of(member).and_then(|index| *self.values.get(index)?) else {
            return Err(Error::invalid(format!("`{name}.{member}` is missing, allowed {allowed}")));
        };
        accept(value).ok_or_else(|| Error::invalid(format!("`{name}.{member}`: found {value}, allowed {allowed}")))
    }

    fn number<T: TryFrom<i64>>(&self, member: &str, least: i64, most: i64) -> Result<T> {
        self.checked(member, &format!("is {least} to {most}"), |value| {
            (least..=most).contains(&value).then(|| T::try_from(value).ok())?
        })
    }

    fn flag(&self, member: &str) -> Result<bool> {
        self.checked(member, "is 0 (false) or 1 (true)", |value| match value {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        })
    }

    fn dtype(&self, member: &str, among: [Dtype; 2]) -> Result<Dtype> {
        let allowed = match among {
            [Dtype::F32, _] => "is 1 (f32) or 2 (f64)",
            _ => "is 3 (i32) or 4 (i64)",
        };
        self.checked(member, allowed, |value| Dtype::from_code(value).filter(|dtype| among.contains(dtype)))
    }

    fn launch(&self) -> Result<LaunchSize> {
        // First, because a payload made for HIP has other sizes that would be refused less clearly.
        let warp_size = "is 32, the warp size of CUDA devices (64 would be a HIP device's: export the model for CUDA)";
        Ok(LaunchSize {
            warp_size: self.checked("warp_size", warp_size, |size| (size == WARP_SIZE).then_some(32))?,
            blocks: self.number("num_blocks", 1, MAX_BLOCKS)?,
            threads: self.checked("num_threads", "is a multiple of 32 from 32 to 1024", |threads| {
                let fits = (WARP_SIZE..=MAX_THREADS).contains(&threads) && threads % WARP_SIZE == 0;
                fits.then(|| u32::try_from(threads).ok())?
            })?,
            shared_bytes: self.number("smem", 0, MAX_SHARED_BYTES)?,
        })
    }
}

/// Where in a payload something is.
#[derive(Clone, Copy)]
struct Path {
    /// Empty for the payload itself and its own members.
    dictionary: &'static str,
    /// Empty for the payload itself.
    member: &'static str,
}

impl Path {
    const WHOLE: Self = Self { dictionary: "", member: "" };

    const fn top(member: &'static str) -> Self {
        Self { dictionary: "", member }
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.dictionary, self.member) {
            ("", "") => f.write_str("the payload"),
            ("", member) => write!(f, "`{member}`"),
            (dictionary, member) => write!(f, "`{dictionary}.{member}`"),
        }
    }
}

/// Reads one JSON value of a known type.
///
/// It asks for any type and refuses the wrong ones itself, because the errors that serde makes quote whole values and
/// do not know the member.
struct Reader<'a> {
    path: Path,
    target: Target<'a>,
}

/// Where a value goes, which tells its type.
enum Target<'a> {
    Integer(&'a mut i64),
    Text(&'a mut Option<String>),
    Dictionary(&'a mut Dictionary),
    Payload(&'a mut Payload),
}

impl Reader<'_> {
    fn wrong<E: de::Error>(&self, found: &str) -> E {
        let wanted = match self.target {
            Target::Integer(_) => "an integer of 64 bits",
            Target::Text(_) => "a string",
            Target::Dictionary(_) => "an object with integer members",
            Target::Payload(_) => "a JSON object",
        };
        E::custom(format!("{}: found {found}, allowed is {wanted}", self.path))
    }
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path)
    }

    fn visit_unit<E: de::Error>(self) -> std::result::Result<(), E> {
        Err(self.wrong("null"))
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> std::result::Result<(), E> {
        Err(self.wrong(if value { "true" } else { "false" }))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> std::result::Result<(), E> {
        let Target::Integer(place) = self.target else {
            return Err(self.wrong(&format!("the number {value}")));
        };
        *place = value;
        Ok(())
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> std::result::Result<(), E> {
        match i64::try_from(value) {
            Ok(value) => self.visit_i64(value),
            Err(_) => Err(self.wrong(&format!("the number {value}"))),
        }
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> std::result::Result<(), E> {
        Err(self.wrong(&format!("the number {value:?}")))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> std::result::Result<(), E> {
        let Target::Text(place) = self.target else {
            return Err(self.wrong(&format!("the string {}", quote(value))));
        };
        *place = Some(value.to_owned());
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, _: A) -> std::result::Result<(), A::Error> {
        Err(self.wrong("an array"))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> std::result::Result<(), A::Error> {
        match self.target {
            Target::Dictionary(dictionary) => read_dictionary(dictionary, map),
            Target::Payload(payload) => read_payload(payload, map),
            _ => Err(self.wrong("an object")),
        }
    }
}

fn read_dictionary<'de, A: MapAccess<'de>>(
    dictionary: &mut Dictionary,
    mut map: A,
) -> std::result::Result<(), A::Error> {
    dictionary.present = true;
    while let Some(index) = map.next_key_seed(Key(dictionary.members.iter().copied()))? {
        let Some(index) = index else {
            map.next_value::<IgnoredAny>()?;
            continue;
        };
        let mut value = 0;
        map.next_value_seed(Reader { path: dictionary.path(index), target: Target::Integer(&mut value) })?;
        dictionary.insert(index, value).map_err(de::Error::custom)?;
    }
    Ok(())
}

fn read_payload<'de, A: MapAccess<'de>>(payload: &mut Payload, mut map: A) -> std::result::Result<(), A::Error> {
    let twice = |path: Path| Err(de::Error::custom(format!("{path} is there twice, it must be there once")));
    // The dictionaries come first, so that a key's index is theirs; the index after them means the source.
    let names = DICTIONARIES.into_iter().map(|(name, _)| name).chain(["kernel"]);
    while let Some(index) = map.next_key_seed(Key(names.clone()))? {
        match index {
            None => {
                map.next_value::<IgnoredAny>()?;
            }
            Some(index) => {
                if let Some(dictionary) = payload.dictionaries.get_mut(index) {
                    let path = Path::top(dictionary.name);
                    if dictionary.present {
                        return twice(path);
                    }
                    map.next_value_seed(Reader { path, target: Target::Dictionary(dictionary) })?;
                } else {
                    let path = Path::top("kernel");
                    if payload.source.is_some() {
                        return twice(path);
                    }
                    map.next_value_seed(Reader { path, target: Target::Text(&mut payload.source) })?;
                }
            }
        }
    }
    Ok(())
}

/// Reads a member's name: its index among the known names, or `None`.
struct Key<I>(I);

impl<'de, I: Iterator<Item = &'static str>> DeserializeSeed<'de> for Key<I> {
    type Value = Option<usize>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Option<usize>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<I: Iterator<Item = &'static str>> Visitor<'_> for Key<I> {
    type Value = Option<usize>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a member")
    }

    fn visit_str<E: de::Error>(mut self, name: &str) -> std::result::Result<Option<usize>, E> {
        Ok(self.0.position(|known| known == name))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::error::Code;

    const fn always(name: &'static str) -> EntryPoint {
        EntryPoint { name, deterministic_only: false }
    }

    const PRODUCT: Requirements =
        Requirements { entry_points: &[always("forward"), always("backward")], convolution: false };

    const CONVOLUTION: Requirements = Requirements {
        entry_points: &[always("forward"), EntryPoint { name: "fixup", deterministic_only: true }],
        convolution: true,
    };

    const SOURCE: &str = "__global__ void forward() {}\n__global__ void backward() {}\n__global__ void fixup() {}\n";

    fn launch(blocks: u32, threads: u32, shared_bytes: u32) -> Value {
        json!({"num_blocks": blocks, "num_threads": threads, "warp_size": 32, "smem": shared_bytes})
    }

    /// A payload with every member, that both families accept.
    fn payload() -> Value {
        json!({
            "kernel": SOURCE,
            "forward_config": launch(528, 256, 49664),
            "backward_config": launch(132, 192, 0),
            "double_backward_config": launch(1, 32, 232_448),
            "kernel_prop": {
                "L1_dim": 128, "L2_dim": 16, "L3_dim": 1088, "weight_numel": 320, "shared_weights": 1, "opt_level": 3,
                "irrep_dtype": 1, "weight_dtype": 2, "workspace_size": 1000, "deterministic": 1, "idx_dtype": 3,
            },
        })
    }

    /// The payload with the member at a dotted path replaced, or removed for `None`.
    fn with(path: &str, value: Option<Value>) -> String {
        let mut root = payload();
        let (parent, member) = match path.split_once('.') {
            Some((dictionary, member)) => (root.get_mut(dictionary).unwrap(), member),
            None => (&mut root, path),
        };
        let members = parent.as_object_mut().unwrap();
        match value {
            Some(value) => members.insert(member.to_owned(), value),
            None => members.remove(member),
        };
        root.to_string()
    }

    fn refusal(text: &str, needs: &Requirements) -> String {
        let error = KernelPlan::from_json(text.as_bytes(), needs).unwrap_err();
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().len() < 300, "{error}");
        error.message().to_owned()
    }

    /// The dictionaries of a payload in JSON, as the older form has them.
    fn dictionaries(payload: &Value) -> Vec<Vec<(&str, i64)>> {
        let members = |name| payload[name].as_object().unwrap().iter();
        DICTIONARIES
            .map(|(name, _)| members(name).map(|(member, value)| (member.as_str(), value.as_i64().unwrap())).collect())
            .into()
    }

    fn older<'a>(source: &'a [u8], dictionaries: &'a [Vec<(&'a str, i64)>]) -> DictionaryPayload<'a> {
        DictionaryPayload {
            source,
            forward_config: &dictionaries[0],
            backward_config: &dictionaries[1],
            double_backward_config: &dictionaries[2],
            kernel_prop: &dictionaries[3],
        }
    }

    #[test]
    fn both_forms_make_the_same_plan() {
        let payload = payload();
        let plan = KernelPlan::from_json(payload.to_string().as_bytes(), &CONVOLUTION).unwrap();
        let size = |blocks, threads, shared_bytes| LaunchSize { blocks, threads, warp_size: 32, shared_bytes };
        let expected = KernelPlan {
            source: SOURCE.to_owned(),
            forward: size(528, 256, 49664),
            backward: size(132, 192, 0),
            double_backward: size(1, 32, 232_448),
            l1_dim: 128,
            l2_dim: 16,
            l3_dim: 1088,
            weight_numel: 320,
            shared_weights: true,
            irrep_dtype: Dtype::F32,
            weight_dtype: Dtype::F64,
            workspace_bytes: 1000,
            deterministic: true,
            index_dtype: Some(Dtype::I32),
        };
        assert_eq!(plan, expected);
        let dictionaries = dictionaries(&payload);
        assert_eq!(KernelPlan::from_dictionaries(&older(SOURCE.as_bytes(), &dictionaries), &CONVOLUTION), Ok(expected));
    }

    #[test]
    fn tensor_products_ignore_what_only_convolutions_use() {
        for (member, value) in [("idx_dtype", json!(0)), ("workspace_size", json!(-1)), ("deterministic", json!(7))] {
            for value in [Some(value.clone()), None] {
                let path = format!("kernel_prop.{member}");
                let plan = KernelPlan::from_json(with(&path, value.clone()).as_bytes(), &PRODUCT).unwrap();
                assert_eq!((plan.workspace_bytes, plan.deterministic, plan.index_dtype), (0, false, None));
                assert!(refusal(&with(&path, value), &CONVOLUTION).contains(&path));
            }
        }
    }

    #[test]
    fn names_the_member_what_was_found_and_what_is_allowed() {
        for (path, value, expected) in [
            ("kernel", json!(""), "`kernel` is empty"),
            ("kernel", json!("a\0b"), "`kernel` has a NUL character at byte 1"),
            ("kernel", json!(5), "`kernel`: found the number 5, allowed is a string"),
            ("kernel", json!("/*"), "`kernel`: the source has an unterminated /* comment"),
            ("kernel", json!("__global__ void f() {}"), "define the __global__ function `forward`, it defines 1 such"),
            ("kernel", json!("__global__ void forward() {}"), "define the __global__ function `fixup`, it defines 1"),
            ("forward_config", json!([]), "`forward_config`: found an array, allowed is an object"),
            ("forward_config", json!({}), "`forward_config.warp_size` is missing, allowed is 32"),
            ("forward_config.warp_size", json!(64), "`forward_config.warp_size`: found 64, allowed is 32"),
            ("forward_config.warp_size", json!(64), "HIP"),
            ("backward_config.num_threads", json!(0), "found 0, allowed is a multiple of 32 from 32 to 1024"),
            ("backward_config.num_threads", json!(1056), "`backward_config.num_threads`: found 1056"),
            ("backward_config.num_threads", json!(100), "`backward_config.num_threads`: found 100"),
            ("backward_config.num_threads", json!("192"), "found the string \"192\", allowed is an integer"),
            ("backward_config.num_threads", json!(192.0), "found the number 192.0, allowed is an integer"),
            ("backward_config.num_threads", json!(true), "found true, allowed is an integer"),
            ("backward_config.num_threads", json!(null), "found null, allowed is an integer"),
            ("backward_config.num_threads", json!({"a": 1}), "found an object, allowed is an integer"),
            ("double_backward_config.num_blocks", json!(0), "found 0, allowed is 1 to 2147483647"),
            ("double_backward_config.num_blocks", json!(1_i64 << 31), "found 2147483648, allowed is 1 to 2147483647"),
            ("double_backward_config.smem", json!(-1), "found -1, allowed is 0 to 1048576"),
            ("double_backward_config.smem", json!((1 << 20) + 1), "found 1048577, allowed is 0 to 1048576"),
            ("kernel_prop.L1_dim", json!(0), "`kernel_prop.L1_dim`: found 0, allowed is 1 to 1099511627776"),
            ("kernel_prop.L2_dim", json!(-5), "`kernel_prop.L2_dim`: found -5"),
            ("kernel_prop.L3_dim", json!((1_i64 << 40) + 1), "`kernel_prop.L3_dim`: found 1099511627777"),
            ("kernel_prop.L3_dim", json!(1_u64 << 63), "found the number 9223372036854775808, allowed is an integer"),
            ("kernel_prop.L3_dim", json!(1e30), "found the number 1e30, allowed is an integer"),
            ("kernel_prop.weight_numel", json!(0), "`kernel_prop.weight_numel`: found 0"),
            ("kernel_prop.shared_weights", json!(2), "found 2, allowed is 0 (false) or 1 (true)"),
            ("kernel_prop.deterministic", json!(-1), "found -1, allowed is 0 (false) or 1 (true)"),
            ("kernel_prop.irrep_dtype", json!(3), "found 3, allowed is 1 (f32) or 2 (f64)"),
            ("kernel_prop.weight_dtype", json!(6), "found 6, allowed is 1 (f32) or 2 (f64)"),
            ("kernel_prop.idx_dtype", json!(0), "found 0, allowed is 3 (i32) or 4 (i64)"),
            ("kernel_prop.workspace_size", json!(0), "found 0, allowed is 1 to 1099511627776"),
        ] {
            let message = refusal(&with(path, Some(value)), &CONVOLUTION);
            assert!(message.contains(expected), "{message}\nshould contain\n{expected}");
            assert!(message.starts_with(&format!("`{path}")), "{message}");
        }
        for path in ["kernel", "forward_config", "kernel_prop", "kernel_prop.L1_dim", "backward_config.smem"] {
            let message = refusal(&with(path, None), &CONVOLUTION);
            assert!(message.starts_with(&format!("`{path}` is missing")), "{message}");
        }
    }

    #[test]
    fn a_convolution_without_fix_ups_needs_no_fix_up_and_no_workspace() {
        let mut payload = payload();
        payload["kernel"] = json!("__global__ void forward() {}");
        payload["kernel_prop"]["deterministic"] = json!(0);
        payload["kernel_prop"]["workspace_size"] = json!(0);
        let plan = KernelPlan::from_json(payload.to_string().as_bytes(), &CONVOLUTION).unwrap();
        assert!(!plan.deterministic && plan.workspace_bytes == 0);
    }

    #[test]
    fn refuses_text_that_is_not_one_object_with_each_member_once() {
        let text = payload().to_string();
        let launch = r#""forward_config":{"num_blocks":1,"num_threads":32,"warp_size":32,"smem":0},"#;
        for (text, expected) in [
            (String::new(), "the payload is not one JSON object: EOF"),
            ("[1]".to_owned(), "the payload: found an array, allowed is a JSON object"),
            ("\"text\"".to_owned(), "the payload: found the string \"text\""),
            (text.clone() + "x", "the payload is not one JSON object: trailing characters"),
            (text.clone() + &text, "the payload is not one JSON object: trailing characters"),
            (text[..text.len() - 1].to_owned(), "the payload is not one JSON object: EOF"),
            (text.replacen('{', &format!("{{{launch}"), 1), "`forward_config` is there twice"),
            (text.replacen('{', "{\"kernel\":\"\",", 1), "`kernel` is there twice"),
            (text.replace("\"L1_dim\"", "\"L1_dim\":1,\"L1_dim\""), "`kernel_prop.L1_dim` is there twice"),
            (text.replace("\"L1_dim\"", "\"L1\\u005fdim\":1,\"L1_dim\""), "`kernel_prop.L1_dim` is there twice"),
            (text.replace("320", "03"), "the payload is not one JSON object: invalid number"),
            (text.replace("320", &"9".repeat(1000)), "number out of range"),
        ] {
            let message = refusal(&text, &CONVOLUTION);
            assert!(message.contains(expected), "{message}\nshould contain\n{expected}");
        }
        let mut bytes = text.into_bytes();
        bytes[20] = 0xff;
        let error = KernelPlan::from_json(&bytes, &CONVOLUTION).unwrap_err();
        assert_eq!(error.message(), "the payload is not UTF-8 text: see byte 20");
    }

    #[test]
    fn quotes_little_of_what_it_refuses() {
        for text in ["x".repeat(1 << 20), "\u{202e}".repeat(1000), "\n\0é".repeat(1000)] {
            for path in ["kernel_prop", "kernel_prop.L1_dim"] {
                let message = refusal(&with(path, Some(json!(text))), &CONVOLUTION);
                assert!(message.contains("\"...") && message.chars().count() < 200, "{message}");
            }
        }
        let many = (0..10_000).map(|index| format!("__global__ void k{index}() {{}}")).collect::<Vec<_>>().join("\n");
        let message = refusal(&with("kernel", Some(json!(many))), &CONVOLUTION);
        assert!(message.contains("10000 such functions: \"k0, k1, ") && message.len() < 250, "{message}");
    }

    #[test]
    fn ignores_unknown_members_whatever_they_hold() {
        let expected = KernelPlan::from_json(payload().to_string().as_bytes(), &CONVOLUTION).unwrap();
        let deep = format!("{}1{}", "[{\"a\":".repeat(200_000), "}]".repeat(200_000));
        for value in ["null", "1e400", "-1.5", "\"\\u0000\"", "{\"kernel\":3,\"kernel\":4}", &deep, &"9".repeat(1000)] {
            let text = with("new", Some(json!("HERE"))).replace("\"HERE\"", value);
            assert_eq!(KernelPlan::from_json(text.as_bytes(), &CONVOLUTION).as_ref(), Ok(&expected));
            let text = with("kernel_prop.new", Some(json!("HERE"))).replace("\"HERE\"", value);
            assert_eq!(KernelPlan::from_json(text.as_bytes(), &CONVOLUTION).as_ref(), Ok(&expected));
        }
        // Nested as deeply where something is known: refused, not overflowed.
        assert!(
            refusal(&with("kernel_prop.L1_dim", Some(json!("HERE"))).replace("\"HERE\"", &deep), &PRODUCT)
                .contains("L1_dim")
        );
        assert!(refusal(&"[".repeat(1 << 20), &PRODUCT).contains("found an array"));
    }

    #[test]
    fn dictionaries_are_checked_like_json() {
        let payload = payload();
        let valid = dictionaries(&payload);
        let refusal = |source: &[u8], dictionaries: &[Vec<(&str, i64)>]| {
            KernelPlan::from_dictionaries(&older(source, dictionaries), &CONVOLUTION).unwrap_err().message().to_owned()
        };
        assert_eq!(refusal(b"\xff", &valid), "`kernel` is not UTF-8 text: see byte 0");
        assert!(refusal(b"", &valid).contains("`kernel` is empty"));
        for index in 0..4 {
            let name = DICTIONARIES[index].0;
            let mut changed = valid.clone();
            let (member, value) = changed[index].pop().unwrap();
            assert!(refusal(SOURCE.as_bytes(), &changed).starts_with(&format!("`{name}.{member}` is missing")));
            changed[index].extend([(member, -7)]);
            let message = refusal(SOURCE.as_bytes(), &changed);
            assert!(message.starts_with(&format!("`{name}.{member}`: found -7, allowed is ")), "{message}");
            changed[index].extend([(member, value)]);
            assert!(refusal(SOURCE.as_bytes(), &changed).contains(&format!("`{name}.{member}` is there twice")));
        }
        let mut more = valid.clone();
        more[0].extend([("new", i64::MIN), ("new", i64::MAX), ("", 0)]);
        assert_eq!(
            KernelPlan::from_dictionaries(&older(SOURCE.as_bytes(), &more), &CONVOLUTION),
            KernelPlan::from_json(payload.to_string().as_bytes(), &CONVOLUTION),
        );
    }

    #[test]
    fn the_largest_payload_is_accepted_and_one_byte_more_is_not() {
        let mut text = payload().to_string();
        text.extend(std::iter::repeat_n(' ', MAX_PAYLOAD_BYTES - text.len()));
        assert!(KernelPlan::from_json(text.as_bytes(), &CONVOLUTION).is_ok());
        text.push(' ');
        assert!(refusal(&text, &CONVOLUTION).contains("16777217 bytes, allowed are at most 16777216"));

        let payload = payload();
        let mut dictionaries = dictionaries(&payload);
        let names: usize = dictionaries.iter().flatten().map(|(name, _)| name.len()).sum();
        let source = format!("{SOURCE}{}", " ".repeat(MAX_PAYLOAD_BYTES - SOURCE.len() - names));
        assert!(KernelPlan::from_dictionaries(&older(source.as_bytes(), &dictionaries), &CONVOLUTION).is_ok());
        dictionaries[2].push(("x", 0));
        let error = KernelPlan::from_dictionaries(&older(source.as_bytes(), &dictionaries), &CONVOLUTION).unwrap_err();
        assert!(error.message().contains("16777217 bytes"));
    }

    type Pairs = Vec<(String, i64)>;

    fn identity(source: &str, dictionaries: &[Pairs; 4]) -> Vec<u8> {
        let borrowed: Vec<Vec<(&str, i64)>> = dictionaries
            .iter()
            .map(|pairs| pairs.iter().map(|(name, value)| (name.as_str(), *value)).collect())
            .collect();
        older(source.as_bytes(), &borrowed).identity_bytes()
    }

    /// Few and short names and values, so that two random payloads are often nearly equal.
    fn small_payload() -> impl Strategy<Value = (String, [Pairs; 4])> {
        let pairs = || prop::collection::vec(("[ab]{0,2}", 0_i64..3), 0..3);
        ("[ab]{0,2}", [pairs(), pairs(), pairs(), pairs()])
    }

    proptest! {
        #[test]
        fn identity_is_equal_exactly_for_equal_payloads(a in small_payload(), b in small_payload()) {
            let sorted = |(source, dictionaries): &(String, [Pairs; 4])| {
                let mut dictionaries = dictionaries.clone();
                for pairs in &mut dictionaries {
                    pairs.sort();
                }
                (source.clone(), dictionaries)
            };
            let (bytes_a, bytes_b) = (identity(&a.0, &a.1), identity(&b.0, &b.1));
            prop_assert_eq!(bytes_a == bytes_b, sorted(&a) == sorted(&b));
            let mut reversed = a.1.clone();
            for pairs in &mut reversed {
                pairs.reverse();
            }
            prop_assert_eq!(identity(&a.0, &reversed), bytes_a.clone());
            // Each byte counts, and none is missing.
            let mut moved = a.1.clone();
            let last = moved[0].pop();
            moved[1].extend(last.clone());
            prop_assert_eq!(identity(&a.0, &moved) == bytes_a, last.is_none());
            prop_assert!(serde_json::from_slice::<IgnoredAny>(&bytes_a).is_err());
        }

        #[test]
        fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(KernelPlan::from_json(&bytes, &PRODUCT).is_err());
        }

        /// Any value anywhere: the plan holds what its documentation promises, or there is an error.
        #[test]
        fn plans_keep_their_promises(
            index in 0..22_usize,
            value in prop_oneof![-3_i64..100, any::<i64>(), Just(64), Just(1024), Just(1 << 40), Just((1 << 31) - 1)],
            convolution in any::<bool>(),
        ) {
            let paths: Vec<String> = DICTIONARIES
                .iter()
                .flat_map(|(name, members)| members.iter().map(move |member| format!("{name}.{member}")))
                .collect();
            prop_assert_eq!(paths.len(), 22);
            let needs = if convolution { CONVOLUTION } else { PRODUCT };
            let text = with(&paths[index], Some(json!(value)));
            match KernelPlan::from_json(text.as_bytes(), &needs) {
                Err(error) => prop_assert!(error.message().contains(&paths[index]), "{}", error),
                Ok(plan) => {
                    for size in [plan.forward, plan.backward, plan.double_backward] {
                        prop_assert!(size.warp_size == 32 && (1..1 << 31).contains(&size.blocks));
                        prop_assert!((32..=1024).contains(&size.threads) && size.threads % 32 == 0);
                        prop_assert!(size.shared_bytes <= 1 << 20);
                    }
                    for dim in [plan.l1_dim, plan.l2_dim, plan.l3_dim, plan.weight_numel] {
                        prop_assert!((1..=1 << 40).contains(&dim));
                    }
                    prop_assert!(plan.workspace_bytes <= 1 << 40 && (plan.workspace_bytes > 0 || !plan.deterministic));
                    prop_assert_eq!(plan.index_dtype.is_some(), convolution);
                }
            }
        }
    }

    #[test]
    fn codes_and_sizes_of_types() {
        let known: Vec<_> = (-1..10).filter_map(|code| Some((code, Dtype::from_code(code)?))).collect();
        let described: Vec<_> = known.iter().map(|(code, dtype)| format!("{code} {dtype} {}", dtype.bytes())).collect();
        assert_eq!(described, ["1 f32 4", "2 f64 8", "3 i32 4", "4 i64 8", "5 u8 1"]);
    }
}
