//! Everything that can be configured, in one place: defaults, then `OEQ_*` environment variables, then what the program set.
//!
//! The configuration is read once, when the runtime starts. A value that cannot be is an error that every call reports, never
//! a silent default.

use std::path::PathBuf;

use etcetera::BaseStrategy as _;

use crate::compile::{Target, pool, store};
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
    /// `OEQ_KEEP_BYTES`: how many bytes are kept of kernels that no call site uses, payloads and compiled images. Default:
    /// 512 MiB.
    pub keep_bytes: u64,
    /// `OEQ_STORE`: whether compiled kernels are kept on disk, `on` or `off`.
    pub store: bool,
    /// `OEQ_STORE_DIR`: where. Default: `oeq-native` in the user's cache directory.
    pub store_dir: Option<PathBuf>,
    /// `OEQ_STORE_BYTES`: how large the store may become, in bytes, also as `500M` or `2G` (powers of 1024).
    pub store_bytes: u64,
    /// `OEQ_BUNDLE`: bundles of compiled kernels, paths with colons between them.
    pub bundle: Option<String>,
    /// `OEQ_ARCH`: targets with a suffix, for example `sm_90a,sm_100f`, to compile for on the devices that can run them.
    pub arch: Vec<Target>,
    /// `OEQ_CXX`: the C++ compiler of the host platform, a path or a name in `PATH`. Default: search.
    pub cxx: Option<PathBuf>,
    /// `OEQ_HOST_THREADS`: the most threads that work on one call of the host platform: the one on which XLA calls, and
    /// others of XLA's pool. Default: as for `OEQ_COMPILE_THREADS`.
    pub host_threads: usize,
    /// `OEQ_REPLAY`: whether a call site that is called again and again gets a graph of the driver, which is cheaper than
    /// launches, `on` or `off`.
    pub replay: bool,
}

impl Default for Config {
    fn default() -> Self {
        let threads = pool::default_workers();
        Self {
            compile_threads: threads,
            nvrtc: None,
            compile_units: CompileUnits::default(),
            keep_bytes: 512 << 20,
            store: true,
            store_dir: None,
            store_bytes: store::DEFAULT_BYTES,
            bundle: None,
            arch: Vec::new(),
            cxx: None,
            host_threads: threads,
            replay: true,
        }
    }
}

/// The options' keys; the environment variable of a key is `OEQ_` and the key in upper case.
pub const KEYS: [&str; 12] = [
    "compile_threads",
    "nvrtc",
    "compile_units",
    "keep_bytes",
    "store",
    "store_dir",
    "store_bytes",
    "bundle",
    "arch",
    "cxx",
    "host_threads",
    "replay",
];

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
            "store" => self.store = switch(key, value)?,
            "replay" => self.replay = switch(key, value)?,
            "store_dir" => {
                // A relative path would be another directory in every process.
                self.store_dir = Some(std::path::absolute(value).map_err(|_| bad(key, value, "a directory"))?);
            }
            "store_bytes" => {
                self.store_bytes = bytes(value).ok_or_else(|| bad(key, value, "a size like 1000000, 500M or 2G"))?;
            }
            "bundle" => self.bundle = Some(value.to_owned()),
            "arch" => self.arch = value.split(',').map(|target| target.trim().parse()).collect::<Result<_>>()?,
            "cxx" => self.cxx = Some(PathBuf::from(value)),
            "host_threads" => self.host_threads = threads(key, value)?,
            _ => {
                return Err(Error::invalid(format!("unknown option `{key}`; the options are {}", KEYS.join(", "))));
            }
        }
        Ok(())
    }

    /// Where compiled kernels are kept, if they were; `None` where the user has no home.
    #[must_use]
    pub fn store_directory(&self) -> Option<PathBuf> {
        self.store_dir.clone().or_else(|| Some(etcetera::choose_base_strategy().ok()?.cache_dir().join("oeq-native")))
    }
}

/// Reads a number of bytes, with K, M, G or T for powers of 1024.
fn bytes(text: &str) -> Option<u64> {
    let power = ["K", "M", "G", "T"].iter().position(|unit| text.ends_with(unit));
    let digits = if power.is_some() { &text[..text.len() - 1] } else { text };
    let factor = 1024_u64.checked_pow(power.map_or(0, |power| u32::try_from(power + 1).unwrap_or(0)))?;
    digits.parse::<u64>().ok().filter(|number| *number > 0)?.checked_mul(factor)
}

fn switch(key: &str, value: &str) -> Result<bool> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(bad(key, value, "`on` or `off`")),
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
            ("store", "maybe", "`on` or `off`"),
            ("replay", "1", "`on` or `off`"),
            ("store_bytes", "0", "500M or 2G"),
            ("store_bytes", "M", "500M or 2G"),
            ("store_bytes", "99999999T", "500M or 2G"),
            ("colour", "red", "compile_threads, nvrtc"),
        ] {
            let error = config.set(key, value).unwrap_err();
            assert!(error.message().contains(allowed) && error.message().contains(key), "{error}");
        }
        config.set("compile_threads", "3").unwrap();
        config.set("compile_units", "whole").unwrap();
        assert_eq!((config.compile_threads, config.compile_units), (3, CompileUnits::Whole));
    }

    #[test]
    fn sizes_paths_and_targets_are_read() {
        let mut config = Config::default();
        for (text, size) in [("17", 17), ("3K", 3 << 10), ("500M", 500 << 20), ("2G", 2 << 30)] {
            config.set("store_bytes", text).unwrap();
            assert_eq!(config.store_bytes, size);
        }
        config.set("store_dir", "here").unwrap();
        assert_eq!(config.store_directory().unwrap(), std::env::current_dir().unwrap().join("here"));
        config.set("arch", "sm_90a, sm_100f").unwrap();
        assert_eq!(config.arch.iter().map(ToString::to_string).collect::<Vec<_>>(), ["sm_90a", "sm_100f"]);
        assert!(config.set("arch", "sm_9x").unwrap_err().message().contains("sm_9x"));
        config.set("store", "off").unwrap();
        assert!(!config.store);
    }
}
