//! Log lines for hosts that are not written in Rust.
//!
//! A Rust program sets a logger of the `log` crate, and this module stays out of its way. Any other host gives a callback
//! ([`set`]), and `OEQ_LOG` says how much of it wants to hear. Without either nothing is written anywhere: standard output
//! and error belong to the host.

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use log::{Level, LevelFilter, Log, Metadata, Record};

use crate::error::{Code, Error, Result};

/// Takes a line and its level (1 error, 2 warning, 3 information, 4 debugging, 5 tracing). Called from any thread.
pub type Sink = Arc<dyn Fn(Level, &str) + Send + Sync>;

/// What `OEQ_LOG` means when it is not set.
const DEFAULT: LevelFilter = LevelFilter::Warn;

struct Forward(ArcSwapOption<Box<Sink>>);

static FORWARD: Forward = Forward(ArcSwapOption::const_empty());

impl Log for Forward {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Lines of other crates in this library are not the host's business.
        metadata.target().starts_with("oeq_native")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        if let Some(sink) = &*self.0.load() {
            let line = record.args().to_string();
            let sent = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| sink(record.level(), &line)));
            if let Err(panic) = sent {
                // What was thrown may throw again.
                std::mem::forget(panic);
            }
        }
    }

    fn flush(&self) {}
}

/// Reads a level as `OEQ_LOG` has it.
///
/// # Errors
/// `INVALID_ARGUMENT` for anything but a level's name.
pub fn level(text: &str) -> Result<LevelFilter> {
    text.parse().map_err(|_| {
        Error::invalid(format!("option `log` is `{text}`; expected `off`, `error`, `warn`, `info`, `debug` or `trace`"))
    })
}

/// Sends log lines to `sink` from now on, or nowhere. How many, `OEQ_LOG` says; warnings and errors if it is not set.
///
/// # Errors
/// `ALREADY_EXISTS` if the program has a logger of the `log` crate; it gets the lines already. `INVALID_ARGUMENT` if
/// `OEQ_LOG` is no level.
pub fn set(sink: Option<Sink>) -> Result<()> {
    let wanted = match std::env::var("OEQ_LOG") {
        Ok(text) if !text.is_empty() => level(&text).map_err(|error| error.context("environment variable OEQ_LOG"))?,
        Err(std::env::VarError::NotUnicode(_)) => {
            return Err(Error::invalid("environment variable OEQ_LOG is not UTF-8"));
        }
        _ => DEFAULT,
    };
    // It fails where there is a logger, which may be ours from an earlier call.
    let ours = log::set_logger(&FORWARD).is_ok() || std::ptr::addr_eq(log::logger(), &raw const FORWARD);
    if !ours {
        return Err(Error::new(
            Code::AlreadyExists,
            "the program has a logger already, which gets this library's lines",
        ));
    }
    log::set_max_level(if sink.is_some() { wanted } else { LevelFilter::Off });
    FORWARD.0.store(sink.map(|sink| Arc::new(Box::new(sink))));
    Ok(())
}
