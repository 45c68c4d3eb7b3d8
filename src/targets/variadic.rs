//! `oeq_tensor_product` and `oeq_convolution`: one target per family, whose i64 attribute `derivative` (0, 1 or 2) picks
//! the order. Operands and results are those of the classic target of that order.

use super::{convolution, tensor_product};
use crate::layout::Family;
use crate::registry::{Derivative, Target};

/// Any order of a tensor product.
#[derive(Debug)]
pub struct TensorProduct;

impl Target for TensorProduct {
    const NAME: &'static str = "oeq_tensor_product";
    const FAMILY: &'static Family = &tensor_product::FAMILY;
    const DERIVATIVE: Derivative = Derivative::Attribute;
}

/// Any order of a convolution.
#[derive(Debug)]
pub struct Convolution;

impl Target for Convolution {
    const NAME: &'static str = "oeq_convolution";
    const FAMILY: &'static Family = &convolution::FAMILY;
    const DERIVATIVE: Derivative = Derivative::Attribute;
}

crate::submit_targets!(pub(crate) ANCHOR = [TensorProduct, Convolution]);
