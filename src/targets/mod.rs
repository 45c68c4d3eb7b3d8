//! The targets that come with the crate: one file per kernel family, and the variadic names over both.
//!
//! A target submits itself ([`crate::submit_targets!`]); nothing lists targets. The only list here is of files, and it
//! serves a second purpose: each file's `ANCHOR` is referenced from it, so a static link that drops unreferenced objects
//! still keeps the submissions in them (see [`crate::registry`]).

macro_rules! families {
    ($($(#[$doc:meta])* $file:ident),* $(,)?) => {
        $($(#[$doc])* pub mod $file;)*
        /// The submissions that must be in the table, one anchor per file.
        pub(crate) static ANCHORS: &[&crate::registry::Anchor] = &[$(&$file::ANCHOR),*];
    };
}

families! {
    /// Convolutions over a graph: gather, tensor product, scatter.
    convolution,
    /// Batches of tensor products.
    tensor_product,
    /// Targets whose attribute `derivative` picks the order.
    variadic,
}
