//! Kernels at run time: payloads interned by identity ([`intern`]), what was compiled and loaded for each ([`record`]), and
//! what one call site keeps ([`state`]).

pub mod intern;
pub mod record;
pub mod state;

pub use intern::{Interner, Payload};
pub use record::{Launcher, Record};
pub use state::CallState;
