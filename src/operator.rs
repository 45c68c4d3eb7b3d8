//! Kernels for Rust programs that have no XLA: build an operator from a payload, and call it on device memory.
//!
//! An operator goes the same way as a call from XLA: its payload is interned, so equal ones share their compilations and
//! modules with each other and with XLA's calls, and a call is checked, zeroed and launched by the same code. A call of the
//! sizes of the one before is not checked again: it is the same call site, and becomes a graph of the driver as XLA's do.
//! After a change of sizes that takes 256 calls, because making a graph costs the host a third of a millisecond.
//!
//! ```no_run
//! use cust::memory::DeviceBuffer;
//! use cust::stream::{Stream, StreamFlags};
//! use oeq_native::Runtime;
//! use oeq_native::operator::{RawStream, TensorProduct};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let product = TensorProduct::new(Runtime::global()?, &std::fs::read("payload.json")?)?;
//! product.prefetch(0, 0)?; // forward, on device 0: compiles in the background
//!
//! let _context = cust::quick_init()?;
//! let stream = Stream::new(StreamFlags::NON_BLOCKING, None)?;
//! let plan = product.plan();
//! let batch = 1000;
//! let of = |width: u64| DeviceBuffer::<f32>::zeroed(batch * width as usize);
//! let (l1, l2, weights) = (of(plan.l1_dim)?, of(plan.l2_dim)?, of(plan.weight_numel)?);
//! let mut l3 = of(plan.l3_dim)?;
//! // SAFETY: the buffers outlive the synchronisation below, and nothing else touches them until then.
//! unsafe { product.forward(0, RawStream::of(&stream), &l1, &l2, &weights, &mut l3)? };
//! stream.synchronize()?;
//! # Ok(())
//! # }
//! ```

#![allow(clippy::needless_pass_by_value, reason = "a call holds its results and scratch exclusively")]

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use cust::memory::{DeviceCopy, DeviceSlice};
use cust::stream::Stream as CudaStream;
use smallvec::SmallVec;

use crate::driver::Stream;
use crate::error::{Error, Result};
use crate::kernel::record::MAX_ORDERS;
use crate::kernel::state::{Addresses, MAX_TENSORS};
use crate::kernel::{CallState, Payload, Record};
use crate::layout::{Family, TensorView};
use crate::payload::{Dtype, KernelPlan};
use crate::runtime::Runtime;
use crate::targets::{convolution, tensor_product};

/// A stream to enqueue on: a raw `CUstream`, null for the default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawStream(pub *mut std::ffi::c_void);

impl RawStream {
    /// The handle of one of `cust`'s streams.
    #[must_use]
    pub fn of(stream: &CudaStream) -> Self {
        Self(stream.as_inner().cast())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    impl Sealed for i32 {}
    impl Sealed for i64 {}
    impl Sealed for u8 {}
}

/// Element types of device memory.
pub trait Element: DeviceCopy + sealed::Sealed {
    /// The type, as payloads name it.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),*) => { $(impl Element for $type { const DTYPE: Dtype = Dtype::$dtype; })* };
}
elements!(f32 => F32, f64 => F64, i32 => I32, i64 => I64, u8 => U8);

/// A tensor of a call: an address and what is known of its shape.
#[derive(Debug)]
struct Slice {
    address: u64,
    elements: usize,
    dtype: Dtype,
}

impl Slice {
    fn of<T: Element>(slice: &DeviceSlice<T>) -> Self {
        let elements = slice.len();
        let address = if elements == 0 { 0 } else { slice.as_device_ptr().as_raw() };
        Self { address, elements, dtype: T::DTYPE }
    }
}

/// A call whose tensors were checked: what XLA would keep for a call site.
#[derive(Debug)]
struct Site {
    state: CallState,
    /// Elements and type of each tensor.
    tensors: SmallVec<[(usize, Dtype); MAX_TENSORS]>,
}

impl Site {
    fn is_of(&self, operands: &[Slice], results: &[Slice]) -> bool {
        let tensors = operands.iter().chain(results).map(|slice| (slice.elements, slice.dtype));
        self.tensors.iter().copied().eq(tensors)
    }
}

/// The part that both operators share: a record, and a call's way through it.
#[derive(Debug)]
struct Operator {
    runtime: &'static Runtime,
    record: Arc<Record>,
    /// The last call of each order.
    sites: [ArcSwapOption<Site>; MAX_ORDERS],
    /// Makes the operator a user of the record for as long as it lives, so that a call is not the first and last one.
    _user: CallState,
}

impl Operator {
    fn new(runtime: &'static Runtime, family: &'static Family, payload: &[u8]) -> Result<Self> {
        // Callers have no hash of OEQ's; any will do, as long as equal payloads have equal ones.
        let hash = ahash::RandomState::with_seeds(1, 2, 3, 4).hash_one(payload);
        let record = runtime.intern(family, i64::from_ne_bytes(hash.to_ne_bytes()), Payload::Json(payload))?;
        let user = CallState::new(Arc::clone(&record), 0)?;
        Ok(Self { runtime, record, sites: Default::default(), _user: user })
    }

    fn prefetch(&self, derivative: usize, ordinal: u32) -> Result<()> {
        let architectures = self.runtime.driver.architectures()?;
        let architecture = architectures.get(ordinal as usize).ok_or_else(|| {
            Error::invalid(format!(
                "device ordinal {ordinal} does not exist; this process sees {}",
                architectures.len()
            ))
        })?;
        self.record.schedule(self.runtime, derivative, *architecture)
    }

    /// Checks the tensors and runs the call.
    ///
    /// # Safety
    /// The slices are device memory of that device, alive until the work on the stream is done.
    unsafe fn call(
        &self,
        derivative: usize,
        ordinal: u32,
        stream: RawStream,
        operands: &[Slice],
        results: &[Slice],
    ) -> Result<()> {
        let last = self.sites.get(derivative).map(ArcSwapOption::load);
        let site = match last.as_deref() {
            Some(Some(site)) if site.is_of(operands, results) => site,
            _ => &self.site(derivative, operands, results)?,
        };
        let prepared = site.state.prepared().ok_or_else(|| Error::internal("a checked call is not prepared"))?;
        let mut addresses = Addresses::default();
        addresses.extend(operands.iter().chain(results).map(|slice| slice.address));
        // SAFETY: tensors of these sizes were checked; the rest is the caller's word.
        unsafe { site.state.execute(self.runtime, ordinal, Stream(stream.0), prepared, &addresses) }
    }

    /// Checks the tensors, and keeps the call for the next of its kind.
    #[cold]
    fn site(&self, derivative: usize, operands: &[Slice], results: &[Slice]) -> Result<Arc<Site>> {
        let plan = self.record.plan();
        let call = self.record.call(derivative)?;
        let specs = call.operands.iter().chain(call.results);
        let dimensions = specs
            .zip(operands.iter().chain(results))
            .map(|(spec, slice)| spec.dimensions_of(plan, slice.elements))
            .collect::<Result<SmallVec<[SmallVec<[i64; 2]>; 16]>>>()?;
        let slices = operands.iter().chain(results).zip(&dimensions);
        let views: SmallVec<[TensorView<'_>; 16]> =
            slices.map(|(slice, dimensions)| TensorView { dtype: Ok(slice.dtype), dimensions }).collect();
        let place = self.sites.get(derivative);
        let record = Arc::clone(&self.record);
        let state = match place.map(ArcSwapOption::load_full) {
            Some(Some(_)) => CallState::after_change(record, derivative),
            _ => CallState::new(record, derivative),
        }?;
        state.check(&views[..operands.len()], &views[operands.len()..])?;
        let tensors = operands.iter().chain(results).map(|slice| (slice.elements, slice.dtype)).collect();
        let site = Arc::new(Site { state, tensors });
        if let Some(place) = place {
            place.store(Some(Arc::clone(&site)));
        }
        Ok(site)
    }
}

/// A batch of tensor products. Slices are rows one after another, `batch` rows each unless said otherwise; weights are one
/// row for all when the payload shares them. `T` is the payload's `irrep_dtype`, `W` its `weight_dtype`.
#[derive(Debug)]
pub struct TensorProduct(Operator);

impl TensorProduct {
    /// The operator of a payload (JSON text).
    ///
    /// # Errors
    /// The payload is not valid for a tensor product.
    pub fn new(runtime: &'static Runtime, payload: &[u8]) -> Result<Self> {
        Operator::new(runtime, &tensor_product::FAMILY, payload).map(Self)
    }

    /// The payload.
    #[must_use]
    pub fn plan(&self) -> &KernelPlan {
        self.0.record.plan()
    }

    /// Starts compiling what a derivative order (0, 1 or 2) needs on a device, and does not wait.
    ///
    /// # Errors
    /// No driver, no such device or no such order.
    pub fn prefetch(&self, derivative: usize, ordinal: u32) -> Result<()> {
        self.0.prefetch(derivative, ordinal)
    }

    /// `l3 = weights (l1 x l2)`. Enqueues; waits only for a compilation that is not done, and where the driver makes a graph.
    ///
    /// # Errors
    /// Slices that do not fit together, named; a failed compilation; the driver's.
    ///
    /// # Safety
    /// The stream and the slices belong to the device `ordinal`, and the slices stay alive and untouched by others until the
    /// work on the stream is done.
    pub unsafe fn forward<T: Element, W: Element>(
        &self,
        ordinal: u32,
        stream: RawStream,
        l1: &DeviceSlice<T>,
        l2: &DeviceSlice<T>,
        weights: &DeviceSlice<W>,
        l3: &mut DeviceSlice<T>,
    ) -> Result<()> {
        let operands = [Slice::of(l1), Slice::of(l2), Slice::of(weights)];
        // SAFETY: by this function's contract.
        unsafe { self.0.call(0, ordinal, stream, &operands, &[Slice::of(l3)]) }
    }

    /// Gradients of [`TensorProduct::forward`] for the gradient of its result; results are overwritten.
    ///
    /// # Errors
    /// As for [`TensorProduct::forward`].
    ///
    /// # Safety
    /// As for [`TensorProduct::forward`].
    pub unsafe fn backward<T: Element, W: Element>(
        &self,
        ordinal: u32,
        stream: RawStream,
        operands: Primal<'_, T, W>,
        l3_grad: &DeviceSlice<T>,
        results: Gradients<'_, T, W>,
    ) -> Result<()> {
        let [l1, l2, weights] = operands.slices();
        // SAFETY: by this function's contract.
        unsafe { self.0.call(1, ordinal, stream, &[l1, l2, weights, Slice::of(l3_grad)], &results.slices()) }
    }

    /// Gradients of [`TensorProduct::backward`] for the gradients of its results; results are overwritten.
    ///
    /// # Errors
    /// As for [`TensorProduct::forward`].
    ///
    /// # Safety
    /// As for [`TensorProduct::forward`].
    #[allow(clippy::too_many_arguments, reason = "a second derivative has this many parts")]
    pub unsafe fn double_backward<T: Element, W: Element>(
        &self,
        ordinal: u32,
        stream: RawStream,
        operands: Primal<'_, T, W>,
        l3_grad: &DeviceSlice<T>,
        gradients: Primal<'_, T, W>,
        results: Gradients<'_, T, W>,
        l3_dgrad: &mut DeviceSlice<T>,
    ) -> Result<()> {
        let [l1, l2, weights] = operands.slices();
        let [l1_dgrad, l2_dgrad, weights_dgrad] = gradients.slices();
        let operands = [l1, l2, weights, Slice::of(l3_grad), l1_dgrad, l2_dgrad, weights_dgrad];
        let [l1_grad, l2_grad, weights_grad] = results.slices();
        let results = [l1_grad, l2_grad, weights_grad, Slice::of(l3_dgrad)];
        // SAFETY: by this function's contract.
        unsafe { self.0.call(2, ordinal, stream, &operands, &results) }
    }
}

/// Operands of a forward call, or gradients with respect to them that are given.
#[derive(Debug, Clone, Copy)]
pub struct Primal<'a, T: DeviceCopy, W: DeviceCopy> {
    /// `[rows, L1_dim]`.
    pub l1: &'a DeviceSlice<T>,
    /// `[rows, L2_dim]`.
    pub l2: &'a DeviceSlice<T>,
    /// `[weight_numel]` when shared, else `[rows, weight_numel]`.
    pub weights: &'a DeviceSlice<W>,
}

impl<T: Element, W: Element> Primal<'_, T, W> {
    fn slices(&self) -> [Slice; 3] {
        [Slice::of(self.l1), Slice::of(self.l2), Slice::of(self.weights)]
    }
}

/// Where gradients with respect to a forward call's operands go; shapes are those of [`Primal`].
#[derive(Debug)]
pub struct Gradients<'a, T: DeviceCopy, W: DeviceCopy> {
    /// Of L1.
    pub l1: &'a mut DeviceSlice<T>,
    /// Of L2.
    pub l2: &'a mut DeviceSlice<T>,
    /// Of the weights.
    pub weights: &'a mut DeviceSlice<W>,
}

impl<T: Element, W: Element> Gradients<'_, T, W> {
    fn slices(&self) -> [Slice; 3] {
        [Slice::of(self.l1), Slice::of(self.l2), Slice::of(self.weights)]
    }
}

/// The graph of a convolution and its scratch memory. `I` is the payload's `idx_dtype`.
#[derive(Debug)]
pub struct Graph<'a, I: DeviceCopy> {
    /// `[edges]`, ascending: the node that each edge adds to.
    pub rows: &'a DeviceSlice<I>,
    /// `[edges]`: the node that each edge reads.
    pub cols: &'a DeviceSlice<I>,
    /// `[workspace_size]` bytes, written.
    pub workspace: &'a mut DeviceSlice<u8>,
    /// `[edges]` when the payload is deterministic: the order of the edges by column. Any length otherwise.
    pub transpose_perm: &'a DeviceSlice<I>,
}

impl<I: Element> Graph<'_, I> {
    fn slices(&self) -> [Slice; 4] {
        [Slice::of(self.rows), Slice::of(self.cols), Slice::of(self.workspace), Slice::of(self.transpose_perm)]
    }
}

/// Tensor products on the edges of a graph, summed on its nodes. L1 and L3 have a row for each node, L2 and weights that are
/// not shared one for each edge.
#[derive(Debug)]
pub struct Convolution(Operator);

impl Convolution {
    /// The operator of a payload (JSON text).
    ///
    /// # Errors
    /// The payload is not valid for a convolution.
    pub fn new(runtime: &'static Runtime, payload: &[u8]) -> Result<Self> {
        Operator::new(runtime, &convolution::FAMILY, payload).map(Self)
    }

    /// The payload.
    #[must_use]
    pub fn plan(&self) -> &KernelPlan {
        self.0.record.plan()
    }

    /// Starts compiling what a derivative order (0, 1 or 2) needs on a device, and does not wait.
    ///
    /// # Errors
    /// No driver, no such device or no such order.
    pub fn prefetch(&self, derivative: usize, ordinal: u32) -> Result<()> {
        self.0.prefetch(derivative, ordinal)
    }

    /// `l3[row] = sum over edges of weights (l1[col] x l2[edge])`. Enqueues; waits only for a compilation that is not done, and
    /// where the driver makes a graph.
    ///
    /// # Errors
    /// Slices that do not fit together, named; a failed compilation; the driver's.
    ///
    /// # Safety
    /// As for [`TensorProduct::forward`]; rows and columns are smaller than the number of nodes.
    pub unsafe fn forward<T: Element, W: Element, I: Element>(
        &self,
        ordinal: u32,
        stream: RawStream,
        operands: Primal<'_, T, W>,
        graph: Graph<'_, I>,
        l3: &mut DeviceSlice<T>,
    ) -> Result<()> {
        let operands: SmallVec<[Slice; 11]> = operands.slices().into_iter().chain(graph.slices()).collect();
        // SAFETY: by this function's contract.
        unsafe { self.0.call(0, ordinal, stream, &operands, &[Slice::of(l3)]) }
    }

    /// Gradients of [`Convolution::forward`] for the gradient of its result; results are overwritten.
    ///
    /// # Errors
    /// As for [`Convolution::forward`].
    ///
    /// # Safety
    /// As for [`Convolution::forward`].
    pub unsafe fn backward<T: Element, W: Element, I: Element>(
        &self,
        ordinal: u32,
        stream: RawStream,
        operands: Primal<'_, T, W>,
        l3_grad: &DeviceSlice<T>,
        graph: Graph<'_, I>,
        results: Gradients<'_, T, W>,
    ) -> Result<()> {
        let operands: SmallVec<[Slice; 11]> =
            operands.slices().into_iter().chain([Slice::of(l3_grad)]).chain(graph.slices()).collect();
        // SAFETY: by this function's contract.
        unsafe { self.0.call(1, ordinal, stream, &operands, &results.slices()) }
    }

    /// Gradients of [`Convolution::backward`] for the gradients of its results; results are overwritten.
    ///
    /// # Errors
    /// As for [`Convolution::forward`].
    ///
    /// # Safety
    /// As for [`Convolution::forward`].
    #[allow(clippy::too_many_arguments, reason = "a second derivative has this many parts")]
    pub unsafe fn double_backward<T: Element, W: Element, I: Element>(
        &self,
        ordinal: u32,
        stream: RawStream,
        operands: Primal<'_, T, W>,
        l3_grad: &DeviceSlice<T>,
        gradients: Primal<'_, T, W>,
        graph: Graph<'_, I>,
        results: Gradients<'_, T, W>,
        l3_dgrad: &mut DeviceSlice<T>,
    ) -> Result<()> {
        let operands: SmallVec<[Slice; 11]> = operands
            .slices()
            .into_iter()
            .chain([Slice::of(l3_grad)])
            .chain(gradients.slices())
            .chain(graph.slices())
            .collect();
        let [l1, l2, weights] = results.slices();
        // SAFETY: by this function's contract.
        unsafe { self.0.call(2, ordinal, stream, &operands, &[l1, l2, weights, Slice::of(l3_dgrad)]) }
    }
}
