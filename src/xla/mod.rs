//! Everything that knows XLA: its C structures ([`ffi`]), a safe handle on an api table ([`api`]), a safe view of a call
//! frame ([`frame`]), the stage functions ([`stages`], [`stateless`]), state types ([`types`]) and registration ([`register`], [`pjrt`]).

pub mod api;
pub mod ffi;
pub mod frame;
#[cfg(feature = "host")]
pub mod host;
pub mod pjrt;
pub mod register;
pub mod stages;
pub mod stateless;
pub mod types;
