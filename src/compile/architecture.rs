//! The name of a device architecture, as compiler and driver write it.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// A compute capability, for example 9.0, whose machine code is called `sm_90`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Architecture {
    /// The generation: 9 for Hopper. Machine code runs only on devices of its own generation.
    pub major: u16,
    /// The step within the generation, a single digit.
    pub minor: u16,
}

impl Architecture {
    /// The host CPU, an architecture of its own: no device has a major part of zero.
    pub const HOST: Self = Self { major: 0, minor: 0 };

    /// Makes the architecture `major.minor`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if `major` is zero or above 999, or `minor` is not a single digit: `sm_` names have no way to
    /// write those.
    pub fn new(major: u16, minor: u16) -> Result<Self> {
        if major == 0 || major > 999 || minor > 9 {
            return Err(Error::invalid(format!(
                "compute capability {major}.{minor}: the major part must be 1 to 999, the minor part 0 to 9"
            )));
        }
        Ok(Self { major, minor })
    }

    /// Both parts as one number, the way that `sm_` names and the compiler's list of architectures write it: 90.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.major as u32 * 10 + self.minor as u32
    }

    /// Reads what [`Architecture::number`] writes.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        let (major, minor) = (u16::try_from(number / 10).ok()?, u16::try_from(number % 10).ok()?);
        Self::new(major, minor).ok()
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::HOST {
            return f.write_str("host");
        }
        write!(f, "sm_{}{}", self.major, self.minor)
    }
}

impl FromStr for Architecture {
    type Err = Error;

    /// Reads `sm_90`, `90`, `9.0` or `host`.
    fn from_str(text: &str) -> Result<Self> {
        let bad = || {
            Error::invalid(format!(
                "{text:?} is not a device architecture: expected a form like \"sm_90\", \"90\" or \"9.0\""
            ))
        };
        if text == "host" {
            return Ok(Self::HOST);
        }
        let digits = |part: &str| {
            let plain = !part.is_empty() && part.len() <= 4 && part.bytes().all(|byte| byte.is_ascii_digit());
            if plain { part.parse::<u16>().map_err(|_| bad()) } else { Err(bad()) }
        };
        if let Some((major, minor)) = text.split_once('.') {
            return Self::new(digits(major)?, digits(minor)?).map_err(|_| bad());
        }
        let number = digits(text.strip_prefix("sm_").unwrap_or(text))?;
        Self::from_number(u32::from(number)).ok_or_else(bad)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn the_three_spellings_name_one_architecture() {
        for text in ["sm_90", "90", "9.0"] {
            assert_eq!(text.parse::<Architecture>().unwrap(), Architecture { major: 9, minor: 0 }, "{text}");
        }
        for text in ["sm_103", "103", "10.3"] {
            assert_eq!(text.parse::<Architecture>().unwrap(), Architecture { major: 10, minor: 3 }, "{text}");
        }
    }

    #[test]
    fn text_and_number_survive_the_round_trip() {
        for number in [10, 75, 86, 90, 100, 103, 121, 9999] {
            let architecture = Architecture::from_number(number).unwrap();
            assert_eq!(architecture.number(), number);
            assert_eq!(architecture.to_string(), format!("sm_{number}"));
            assert_eq!(architecture.to_string().parse::<Architecture>().unwrap(), architecture);
        }
        assert_eq!(Architecture::HOST.to_string().parse::<Architecture>().unwrap(), Architecture::HOST);
    }

    #[test]
    fn order_is_that_of_the_numbers() {
        let of = |number| Architecture::from_number(number).unwrap();
        assert!(of(90) < of(100) && of(100) < of(103) && of(89) < of(90));
    }

    #[test]
    fn anything_else_is_refused_with_the_text_in_the_error() {
        let texts = [
            "",
            "9",
            "sm_",
            "sm_9",
            "sm_90a",
            "compute_90",
            "9.",
            ".0",
            "9.10",
            "-90",
            "+90",
            " 90",
            "0.5",
            "05",
            "99999",
            "1000.0",
            "9.0.0",
            "sm_9.0",
        ];
        for text in texts {
            let error = text.parse::<Architecture>().unwrap_err();
            assert_eq!(error.code(), Code::InvalidArgument, "{text}");
            assert!(error.message().contains(&format!("{text:?}")), "{error}");
        }
        assert!(Architecture::new(9, 10).unwrap_err().message().contains("9.10"));
        assert_eq!(Architecture::from_number(u32::MAX), None);
    }
}
