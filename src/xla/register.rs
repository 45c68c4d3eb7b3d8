//! Registration of every target in one XLA, and the report about it.
//!
//! A registration goes through a [`Door`]: XLA's own api table, or what a PJRT plugin offers in its place
//! ([`super::pjrt`]). Not every door tells errors, so the outcome is verified: whatever the door, XLA asks each handler that
//! it takes for its metadata, on the caller's thread, and the handlers of this crate note that they were asked (`noted`).

use std::cell::RefCell;
use std::collections::HashSet;
use std::ffi::c_int;
use std::fmt;
use std::sync::{Mutex, MutexGuard};

use super::api::Api;
use super::types;
use crate::error::{Code, Error, Result};
use crate::registry::{self, Descriptor};
use crate::sync::lock;

/// A platform that targets can be registered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Platform {
    /// NVIDIA GPUs.
    Cuda,
    /// The host CPU.
    Host,
}

impl Platform {
    /// The platform of a name, in any of the spellings that XLA takes.
    ///
    /// # Errors
    /// An unknown name; XLA itself would take it and fail much later.
    pub fn parse(name: &str) -> Result<Self> {
        match name.to_ascii_lowercase().as_str() {
            "cuda" | "gpu" => Ok(Self::Cuda),
            "host" | "cpu" => Ok(Self::Host),
            _ => Err(Error::invalid(format!(
                "platform `{name}` is unknown; expected CUDA, cuda or gpu for NVIDIA GPUs, Host or cpu for the host"
            ))),
        }
    }

    /// XLA's own name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cuda => "CUDA",
            Self::Host => "Host",
        }
    }
}

/// The way by which handlers come into an XLA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Door {
    /// XLA's FFI api table: whole bundles, and errors are told.
    Api = 1,
    /// The GPU custom call extension of a PJRT plugin: whole bundles, errors only from jaxlib 0.11.2 on.
    GpuExtension = 2,
    /// The FFI extension of a PJRT plugin: the execute stage alone, and no errors.
    ExecuteOnly = 3,
}

impl Door {
    /// A name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Api => "FFI api",
            Self::GpuExtension => "GPU custom call extension",
            Self::ExecuteOnly => "execute only",
        }
    }
}

/// What became of one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It was registered now.
    Registered,
    /// This library had registered the same functions in this XLA before.
    AlreadyThere,
    /// XLA did not take it.
    Refused(Error),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registered => f.write_str("registered"),
            Self::AlreadyThere => f.write_str("already there"),
            Self::Refused(error) => write!(f, "refused: {error}"),
        }
    }
}

/// What one registration did.
#[derive(Debug, Clone)]
pub struct Report {
    /// The way that was taken.
    pub door: Door,
    /// For which platform.
    pub platform: Platform,
    /// Minor version of the XLA's FFI api (the major version is 0), where the door shows it.
    pub api_minor: Option<c_int>,
    /// Every target of the table, in its order, and what became of it.
    pub targets: Vec<(&'static str, Outcome)>,
}

impl Report {
    /// One error for everything that was refused: the text names each refused target.
    ///
    /// # Errors
    /// A target was refused.
    pub fn check(&self) -> Result<()> {
        let refused: Vec<(&str, &Error)> = self
            .targets
            .iter()
            .filter_map(|(name, outcome)| match outcome {
                Outcome::Refused(error) => Some((*name, error)),
                _ => None,
            })
            .collect();
        let Some((_, first)) = refused.first() else { return Ok(()) };
        let reasons: Vec<String> =
            refused.iter().map(|(name, error)| format!("`{name}`: {}", error.message())).collect();
        Err(Error::new(
            first.code(),
            format!(
                "XLA refused {} of {} targets for {} ({}): {}",
                refused.len(),
                self.targets.len(),
                self.platform.name(),
                self.door.name(),
                reasons.join("; ")
            ),
        ))
    }
}

/// Which of a handler's stages were asked for their metadata, and by whom.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Noted {
    pub(super) execute: bool,
    pub(super) instantiate: bool,
    /// The asking XLA, from version 0.2 on.
    pub(super) api: Option<Api>,
}

thread_local! {
    /// The target that this thread is registering.
    static WATCHED: RefCell<Option<(&'static str, Noted)>> = const { RefCell::new(None) };
}

/// Takes note of a metadata call, if this thread is registering the target.
pub(super) fn note(target: &str, stage: &str, api: Option<Api>) {
    // A thread that is going down registers nothing.
    let _ = WATCHED.try_with(|watched| {
        let Ok(mut watched) = watched.try_borrow_mut() else { return };
        let Some((_, noted)) = watched.as_mut().filter(|(name, _)| *name == target) else { return };
        noted.api = noted.api.or(api);
        match stage {
            "execute" => noted.execute = true,
            "instantiate" => noted.instantiate = true,
            _ => {}
        }
    });
}

/// Runs a registration of `target`, and answers what was asked meanwhile.
pub(super) fn noted(target: &'static str, registration: impl FnOnce() -> Result<()>) -> (Result<()>, Noted) {
    let _ = WATCHED.try_with(|watched| *watched.borrow_mut() = Some((target, Noted::default())));
    let outcome = registration();
    let noted = WATCHED.try_with(|watched| watched.borrow_mut().take()).ok().flatten();
    (outcome, noted.map(|(_, noted)| noted).unwrap_or_default())
}

/// XLAs that refuse version 0.1 and are told their own: address of the table and minor version.
static REPORTED: Mutex<Vec<(usize, c_int)>> = Mutex::new(Vec::new());

/// The minor version that handlers report to this XLA.
pub(super) fn reported_minor(api: Api) -> c_int {
    let address = api.address() as usize;
    lock(&REPORTED).iter().find(|(known, _)| *known == address).map_or(1, |(_, minor)| *minor)
}

/// From now on handlers report the XLA's own version to it; `false` if they do already.
pub(super) fn report_own_version(api: Api) -> bool {
    if reported_minor(api) == api.minor() {
        return false;
    }
    lock(&REPORTED).push((api.address() as usize, api.minor()));
    true
}

/// What was registered: the XLA (address of its api table or of its plugin's), platform and target.
type Known = HashSet<(usize, Platform, &'static str)>;

/// Lets one registration run at a time, in all doors: XLA's answers are then about ours.
pub(super) fn registering() -> MutexGuard<'static, Option<Known>> {
    static KNOWN: Mutex<Option<Known>> = Mutex::new(None);
    lock(&KNOWN)
}

/// Registers every target with `attempt` and reports.
pub(super) fn all_targets(
    known: &mut Option<Known>,
    xla: usize,
    platform: Platform,
    mut attempt: impl FnMut(&'static Descriptor) -> Result<()>,
) -> Result<Vec<(&'static str, Outcome)>> {
    let known = known.get_or_insert_with(HashSet::new);
    let mut outcome = |target: &'static Descriptor| match attempt(target) {
        Err(error) => Outcome::Refused(error),
        Ok(()) if known.insert((xla, platform, target.name)) => Outcome::Registered,
        Ok(()) => Outcome::AlreadyThere,
    };
    Ok(registry::table()?.entries.iter().map(|entry| (entry.descriptor.name, outcome(entry.descriptor))).collect())
}

/// Registers the state type and every target through XLA's api table. Doing it again, from any thread, changes nothing.
///
/// # Errors
/// The table of targets is broken, or XLA does not take the state type. What XLA says about a target is in the report.
pub fn register(api: Api, platform: Platform) -> Result<Report> {
    let mut known = registering();
    types::id_in(api)?;
    let targets =
        all_targets(&mut known, api.address() as usize, platform, |target| through_api(api, platform, target))?;
    log::debug!("oeq-native: {} targets tried for {} through the FFI api", targets.len(), platform.name());
    Ok(Report { door: Door::Api, platform, api_minor: Some(api.minor()), targets })
}

fn through_api(api: Api, platform: Platform, target: &'static Descriptor) -> Result<()> {
    let bundle = target.bundle_on(platform)?;
    let attempt = || noted(target.name, || api.register_handler(target.name, platform.name(), bundle, target.traits));
    let (mut outcome, mut noted) = attempt();
    // 0.1 is what every XLA so far takes; one that no longer does gets its own version.
    if outcome.as_ref().is_err_and(|error| error.message().contains("API version")) && report_own_version(api) {
        (outcome, noted) = attempt();
    }
    outcome?;
    if noted.execute { Ok(()) } else { Err(unasked()) }
}

/// The door told no error, but XLA never asked the handler what it is.
#[cold]
pub(super) fn unasked() -> Error {
    Error::new(
        Code::Internal,
        "XLA answered success but never asked the handler for its metadata, so it holds another handler or none",
    )
}
