//! Registration of every target in one XLA through its api table.

use std::ffi::c_int;
use std::sync::Mutex;

use super::api::Api;
use super::types;
use crate::error::{Error, Result};
use crate::registry;
use crate::sync::lock;

/// A platform that targets can be registered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
            _ => Err(Error::invalid(format!("platform `{name}` is unknown; expected CUDA (or gpu) or Host (or cpu)"))),
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

/// XLAs that refuse version 0.1 and are told their own: address of the table and minor version.
static REPORTED: Mutex<Vec<(usize, c_int)>> = Mutex::new(Vec::new());

/// The minor version that handlers report to this XLA.
pub(super) fn reported_minor(api: Api) -> c_int {
    let address = api.address() as usize;
    lock(&REPORTED).iter().find(|(known, _)| *known == address).map_or(1, |(_, minor)| *minor)
}

/// Registers the state type and every target. Doing it again, from any thread, changes nothing.
///
/// # Errors
/// The table of targets is broken, or XLA refuses a target: all are tried, and the text names each that was refused.
pub fn register(api: Api, platform: Platform) -> Result<()> {
    let table = registry::table()?;
    types::id_in(api)?;
    let mut refused: Vec<(&str, Error)> = Vec::new();
    for entry in &table.entries {
        let target = entry.descriptor;
        let attempt = || api.register_handler(target.name, platform.name(), target.bundle, target.traits);
        let mut outcome = attempt();
        // 0.1 is what every XLA so far takes; one that no longer does gets its own version.
        if outcome.as_ref().is_err_and(|error| error.message().contains("API version")) && reported_minor(api) == 1 {
            lock(&REPORTED).push((api.address() as usize, api.minor()));
            outcome = attempt();
        }
        if let Err(error) = outcome {
            refused.push((target.name, error));
        }
    }
    let Some((_, first)) = refused.first() else {
        log::debug!("oeq-native: {} targets registered for {}", table.entries.len(), platform.name());
        return Ok(());
    };
    let reasons: Vec<String> = refused.iter().map(|(name, error)| format!("`{name}`: {}", error.message())).collect();
    Err(Error::new(
        first.code(),
        format!(
            "XLA refused {} of {} targets for {}: {}",
            refused.len(),
            table.entries.len(),
            platform.name(),
            reasons.join("; ")
        ),
    ))
}
