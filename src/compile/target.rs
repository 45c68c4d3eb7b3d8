//! What machine code is made for: an architecture, and whether its architecture-specific features may be used.
//!
//! A device has an [`Architecture`]. Code can ask for more than the architecture promises to later ones: `sm_90a` runs on
//! compute capability 9.0 alone, `sm_100f` on its family, which is the devices of the same generation from there on.

use std::fmt;
use std::str::FromStr;

use super::Architecture;
use crate::error::{Error, Result};

/// Which features beyond the plain architecture code may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Features {
    /// None: what every later step of the generation has as well.
    #[default]
    Plain,
    /// Suffix `f`: those of the family.
    Family,
    /// Suffix `a`: those of exactly this architecture.
    Specific,
}

/// What code is made for, for example `sm_90` or `sm_90a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Target {
    /// The architecture without suffix.
    pub base: Architecture,
    /// The suffix.
    pub features: Features,
}

impl Target {
    /// Whether a device can run machine code made for this.
    #[must_use]
    pub fn runs_on(self, device: Architecture) -> bool {
        match self.features {
            Features::Specific => self.base == device,
            Features::Plain | Features::Family => self.base.major == device.major && self.base.minor <= device.minor,
        }
    }

    /// The options that make the compiler produce it, besides those that the base architecture alone has.
    #[must_use]
    pub fn options(self) -> Vec<String> {
        match self.features {
            Features::Plain => Vec::new(),
            Features::Family | Features::Specific => vec![format!("-arch={self}")],
        }
    }
}

impl From<Architecture> for Target {
    fn from(base: Architecture) -> Self {
        Self { base, features: Features::Plain }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.features {
            Features::Plain => "",
            Features::Family => "f",
            Features::Specific => "a",
        };
        write!(f, "{}{suffix}", self.base)
    }
}

impl FromStr for Target {
    type Err = Error;

    /// Reads an architecture, or one with a suffix: `sm_90a`, `90a`, `sm_100f`.
    fn from_str(text: &str) -> Result<Self> {
        let (base, features) = match text.as_bytes().last() {
            Some(b'a') => (&text[..text.len() - 1], Features::Specific),
            Some(b'f') => (&text[..text.len() - 1], Features::Family),
            _ => (text, Features::Plain),
        };
        let base: Architecture = base.parse().map_err(|_| {
            Error::invalid(format!(
                "{text:?} is not a device architecture: expected a form like \"sm_90\", \"90\" or \"9.0\", or one with a \
                 suffix like \"sm_90a\" or \"sm_100f\""
            ))
        })?;
        match features {
            Features::Specific if base.number() < 90 => {
                Err(Error::invalid(format!("{text:?}: architecture-specific code (suffix a) begins with sm_90a")))
            }
            Features::Family if base.number() < 100 => {
                Err(Error::invalid(format!("{text:?}: family-specific code (suffix f) begins with sm_100f")))
            }
            _ => Ok(Self { base, features }),
        }
    }
}

/// The target to compile for on a device: the first of the wanted ones that it can run and that has a suffix, else the
/// device's own architecture.
#[must_use]
pub fn choose(wanted: &[Target], device: Architecture) -> Target {
    let fits = |target: &&Target| target.features != Features::Plain && target.runs_on(device);
    wanted.iter().find(fits).copied().unwrap_or(device.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;

    fn of(text: &str) -> Target {
        text.parse().unwrap()
    }

    #[test]
    fn suffixes_are_read_and_written() {
        for text in ["sm_90", "sm_90a", "sm_100a", "sm_100f", "sm_103f"] {
            assert_eq!(of(text).to_string(), text);
        }
        assert_eq!(of("90a"), of("sm_90a"));
        assert_eq!(of("9.0a"), of("sm_90a"));
        for text in ["sm_90b", "a", "sm_a", "sm_80a", "sm_90f", "90A", "sm_90aa"] {
            assert!(text.parse::<Target>().unwrap_err().message().contains(text), "{text}");
        }
    }

    #[test]
    fn code_runs_where_its_suffix_allows() {
        let device = |text: &str| text.parse::<Architecture>().unwrap();
        let runs = [("sm_90", "90"), ("sm_90a", "90"), ("sm_100f", "103"), ("sm_100", "103"), ("sm_80", "89")];
        let fails = [("sm_90a", "100"), ("sm_100a", "103"), ("sm_103f", "100"), ("sm_90", "100"), ("sm_90", "89")];
        assert!(runs.iter().all(|(target, on)| of(target).runs_on(device(on))));
        assert!(fails.iter().all(|(target, on)| !of(target).runs_on(device(on))));
    }

    #[test]
    fn a_wanted_suffix_is_taken_where_it_runs() {
        let wanted = [of("sm_90a"), of("sm_100f")];
        let chosen = |device: &str| choose(&wanted, device.parse().unwrap()).to_string();
        assert_eq!([chosen("90"), chosen("103"), chosen("80")], ["sm_90a", "sm_100f", "sm_80"]);
    }
}
