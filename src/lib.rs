//! Lets exported JAX models with OpenEquivariance kernels run anywhere XLA runs, without Python.
//!
//! `OpenEquivariance` generates CUDA source for Clebsch-Gordan tensor products and graph convolutions and hides it in XLA
//! custom calls. This crate registers the handlers of those calls in any XLA ([`register_ffi`], [`Plugin`]), compiles
//! their kernels side by side while XLA compiles the model, and launches them on XLA's stream.
//!
//! The way of one call: XLA calls a stage function ([`xla::stages`]), which reads the frame ([`xla::frame`]) and the call
//! site's state ([`kernel::CallState`]), finds the launcher in the shared record ([`kernel::Record`]) and enqueues on the
//! device ([`driver`]).
//!
//! The library lives in processes that it does not own. It never exits, aborts, prints or unwinds into its caller, and it
//! logs through the `log` facade.
//!
//! # Targets of one's own
//! A target is a type that implements [`registry::Target`] and submits itself with [`submit_targets!`]. It is then in the
//! table that every registration reads.

pub mod capi;
pub mod compile;
pub mod config;
pub mod driver;
pub mod error;
pub mod kernel;
pub mod layout;
pub mod logging;
#[cfg(feature = "cli")]
pub mod model;
pub mod operator;
pub mod payload;
pub mod registry;
pub mod runtime;
pub mod source;
pub mod stats;
mod sync;
pub mod targets;
pub mod xla;

pub use error::{Code, Error, Result};
pub use runtime::Runtime;
pub use xla::pjrt::Plugin;
pub use xla::register::{Platform, register as register_ffi};

#[doc(hidden)]
pub mod __private {
    //! For the crate's macros and tests.
    #[cfg(debug_assertions)]
    pub use crate::sync::locks_taken;
    pub use inventory;
}
