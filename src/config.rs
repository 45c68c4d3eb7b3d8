//! Everything that can be configured, in one place: defaults, then `OEQ_*` environment variables, then what the program set.
//!
//! The configuration is read once, when the runtime starts. A value that cannot be is an error that every call reports, never
//! a silent default.

use std::path::PathBuf;

use crate::compile::pool;
use crate::error::{Error, Result};

/// The most threads that may be asked for.
const MAX_THREADS: usize = 1024;

/// How a payload is cut for the compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CompileUnits {
    /// One unit per launch, compiled when a target needs it; the whole program where the source looks unfamiliar.
    #[default]
    Split,
    /// Always the whole program.
    Whole,
}

/// The runtime's options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// `OEQ_COMPILE_THREADS`: the most compilations at a time. Default: the cores available to the process, at most 16.
    pub compile_threads: usize,
    /// `OEQ_NVRTC`: the NVRTC library, or a directory that holds it. Default: search.
    pub nvrtc: Option<PathBuf>,
    /// `OEQ_COMPILE_UNITS`: `split` or `whole`.
    pub compile_units: CompileUnits,
    /// `OEQ_KEEP_BYTES`: how many bytes of compiled images are kept of kernels that no call site uses. Default: 512 MiB.
    pub keep_bytes: u64,
    /// `OEQ_CXX`: the C++ compiler of the host platform, a path or a name in `PATH`. Default: search.
    pub cxx: Option<PathBuf>,
    /// `OEQ_HOST_THREADS`: the most threads that work on one call of the host platform, XLA's own included. Default: as
    /// for `OEQ_COMPILE_THREADS`.
    pub host_threads: usize,
}

impl Default for Config {
    fn default() -> Self {
        let threads = pool::default_workers();
        Self {
            compile_threads: threads,
            nvrtc: None,
            compile_units: CompileUnits::default(),
            keep_bytes: 512 << 20,
            cxx: None,
            host_threads: threads,
        }
    }
}

/// The options' keys; the environment variable of a key is `OEQ_` and the key in upper case.
pub const KEYS: [&str; 6] = ["compile_threads", "nvrtc", "compile_units", "keep_bytes", "cxx", "host_threads"];

impl Config {
    /// The defaults with the environment's values.
    ///
    /// # Errors
    /// A variable has a value that cannot be; the text names the variable, the value and what is allowed.
    pub fn from_environment() -> Result<Self> {
        let mut config = Self::default();
        for key in KEYS {
            let variable = format!("OEQ_{}", key.to_uppercase());
            let Some(value) = std::env::var_os(&variable) else { continue };
            if value.is_empty() {
                continue;
            }
            let value = value
                .to_str()
                .ok_or_else(|| Error::invalid(format!("environment variable {variable} is not UTF-8")))?;
            config.set(key, value).map_err(|error| error.context(format!("environment variable {variable}")))?;
        }
        Ok(config)
    }

    /// Sets one option from text.
    ///
    /// # Errors
    /// An unknown key, or a value that cannot be.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        match key {
            "compile_threads" => self.compile_threads = threads(key, value)?,
            "nvrtc" => self.nvrtc = Some(PathBuf::from(value)),
            "compile_units" => {
                self.compile_units = match value {
                    "split" => CompileUnits::Split,
                    "whole" => CompileUnits::Whole,
                    _ => return Err(bad(key, value, "`split` or `whole`")),
                }
            }
            "keep_bytes" => {
                self.keep_bytes = value.parse().map_err(|_| bad(key, value, "a number of bytes, 0 to keep nothing"))?;
            }
            "cxx" => self.cxx = Some(PathBuf::from(value)),
            "host_threads" => self.host_threads = threads(key, value)?,
            _ => {
                return Err(Error::invalid(format!("unknown option `{key}`; the options are {}", KEYS.join(", "))));
            }
        }
        Ok(())
    }
}

fn threads(key: &str, value: &str) -> Result<usize> {
    let number = value.parse().ok().filter(|threads| (1..=MAX_THREADS).contains(threads));
    number.ok_or_else(|| bad(key, value, &format!("a number from 1 to {MAX_THREADS}")))
}

fn bad(key: &str, value: &str, allowed: &str) -> Error {
    Error::invalid(format!("option `{key}` is `{value}`; expected {allowed}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed test should panic")]

    use super::*;

    #[test]
    fn values_that_cannot_be_are_errors_that_say_what_can() {
        let mut config = Config::default();
        for (key, value, allowed) in [
            ("compile_threads", "0", "1 to 1024"),
            ("compile_threads", "many", "1 to 1024"),
            ("host_threads", "0", "1 to 1024"),
            ("compile_units", "halves", "`split` or `whole`"),
            ("keep_bytes", "-1", "a number of bytes"),
            ("colour", "red", "compile_threads, nvrtc"),
        ] {
            let error = config.set(key, value).unwrap_err();
            assert!(error.message().contains(allowed) && error.message().contains(key), "{error}");
        }
        config.set("compile_threads", "3").unwrap();
        config.set("compile_units", "whole").unwrap();
        assert_eq!((config.compile_threads, config.compile_units), (3, CompileUnits::Whole));
    }
}
