//! A target of another crate: a tensor product under another name.

use oeq_native::layout::Family;
use oeq_native::registry::{self, Derivative, Target};
use oeq_native::targets::tensor_product;

/// The target.
pub struct Outside;

impl Target for Outside {
    const NAME: &'static str = "outside_tensor_product";
    const FAMILY: &'static Family = &tensor_product::FAMILY;
    const DERIVATIVE: Derivative = Derivative::Order(0);
}

oeq_native::submit_targets!(pub ANCHOR = [Outside]);

/// What a program calls before the first registration, so that its linker keeps this crate: 0 is success.
#[unsafe(no_mangle)]
pub extern "C" fn outside_require() -> i32 {
    registry::require(&ANCHOR).map_or_else(|error| error.code() as i32, |()| 0)
}
