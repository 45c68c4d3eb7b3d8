//! A Rust program that calls OpenEquivariance's kernels without XLA: forward, backward and double backward of a payload on
//! random data, checked by what must hold of them, and the host's time for a warm call.
//!
//! usage: `operator PAYLOAD.json [ROWS [NODES]]`
//!
//! ROWS are products of a batch (1,000), or edges of a graph of NODES nodes (ROWS / 20). Needs a GPU. Payloads whose
//! operands and weights have one element type, and whose indices are 32 bits wide.
//!
//! The call is linear in each operand, so for any `g` of its result's shape, with `F` the forward call:
//! `<g, F(x, y, w)> = <x, x_grad> = <y, y_grad> = <w, w_grad>`. The backward call is differentiated in directions `x'`,
//! `y'` and `w'`; with `A = F(x', y, w)`, `B = F(x, y', w)` and `C = F(x, y, w')` the double backward call gives
//! `l3_dgrad = A + B + C`, and gradients with `<x, x_grad> = <g, B + C>`, `<y, y_grad> = <g, A + C>` and
//! `<w, w_grad> = <g, A + B>`.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that tells something")]

use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

use cust::memory::{CopyDestination, DeviceBuffer, DeviceCopy};
use cust::stream::{Stream, StreamFlags};
use oeq_native::Runtime;
use oeq_native::operator::{Convolution, Element, Gradients, Graph, Primal, RawStream, TensorProduct};
use oeq_native::payload::{Dtype, KernelPlan};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Calls that are enqueued before the device is waited for, and how many times that is done.
const CALLS: u32 = 40;
const SAMPLES: usize = 50;

/// How far apart the two sides of an identity may be, as a part of the product of the norms.
const SINGLE: f64 = 1e-5;
const DOUBLE: f64 = 1e-13;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<bool> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("usage: operator PAYLOAD.json [ROWS [NODES]]")?;
    let rows = arguments.next().map_or(Ok(1000), |text| text.parse())?;
    let nodes = arguments.next().map_or(Ok(rows / 20), |text| text.parse())?;
    let payload = std::fs::read(&path)?;
    let _context = cust::quick_init()?;
    let runtime = Runtime::global()?;
    // A payload does not say which family it is of; only one of them takes it.
    let kernel = match Convolution::new(runtime, &payload) {
        Ok(convolution) => Kernel::Convolution(convolution),
        Err(no_convolution) => Kernel::TensorProduct(
            TensorProduct::new(runtime, &payload)
                .map_err(|error| format!("as a convolution: {no_convolution}; as a tensor product: {error}"))?,
        ),
    };
    println!("{path}: {rows} rows{}", if kernel.is_convolution() { format!(", {nodes} nodes") } else { String::new() });
    let plan = kernel.plan();
    match (plan.irrep_dtype, plan.weight_dtype, plan.index_dtype) {
        (Dtype::F32, Dtype::F32, None | Some(Dtype::I32)) => Case::<f32>::new(&kernel, rows, nodes)?.run(SINGLE),
        (Dtype::F64, Dtype::F64, None | Some(Dtype::I32)) => Case::<f64>::new(&kernel, rows, nodes)?.run(DOUBLE),
        (irreps, weights, indices) => {
            Err(format!("element types {irreps}, {weights} and {indices:?}; not in this example").into())
        }
    }
}

enum Kernel {
    TensorProduct(TensorProduct),
    Convolution(Convolution),
}

impl Kernel {
    fn plan(&self) -> &KernelPlan {
        match self {
            Self::TensorProduct(product) => product.plan(),
            Self::Convolution(convolution) => convolution.plan(),
        }
    }

    fn is_convolution(&self) -> bool {
        matches!(self, Self::Convolution(_))
    }
}

/// Operands, or what belongs to them.
struct Operands<T: DeviceCopy> {
    l1: DeviceBuffer<T>,
    l2: DeviceBuffer<T>,
    weights: DeviceBuffer<T>,
}

impl<T: DeviceCopy> Operands<T> {
    fn primal(&self) -> Primal<'_, T, T> {
        Primal { l1: &self.l1, l2: &self.l2, weights: &self.weights }
    }

    fn gradients(&mut self) -> Gradients<'_, T, T> {
        Gradients { l1: &mut self.l1, l2: &mut self.l2, weights: &mut self.weights }
    }
}

/// A kernel with data of its shapes on the device.
struct Case<'a, T: Element> {
    kernel: &'a Kernel,
    stream: Stream,
    operands: Operands<T>,
    directions: Operands<T>,
    results: Operands<T>,
    l3_grad: DeviceBuffer<T>,
    l3: DeviceBuffer<T>,
    rows: DeviceBuffer<i32>,
    cols: DeviceBuffer<i32>,
    workspace: DeviceBuffer<u8>,
    transpose_perm: DeviceBuffer<i32>,
}

impl<'a, T: Element + Into<f64> + From<f32>> Case<'a, T> {
    fn new(kernel: &'a Kernel, count: usize, nodes: usize) -> Outcome<Self> {
        let plan = kernel.plan();
        let mut random = Random(1);
        let (rows, cols, transpose_perm) = undirected(count, nodes, &mut random);
        // A graph has as many edges as it found.
        let (edges, nodes) = if kernel.is_convolution() { (rows.len(), nodes) } else { (count, count) };
        let weight_rows = if plan.shared_weights { 1 } else { edges };
        let mut of = |rows: usize, width: u64| -> Outcome<DeviceBuffer<T>> {
            let values: Vec<T> = (0..rows * usize::try_from(width)?).map(|_| T::from(random.next())).collect();
            Ok(DeviceBuffer::from_slice(&values)?)
        };
        let mut operands = || -> Outcome<Operands<T>> {
            Ok(Operands {
                l1: of(nodes, plan.l1_dim)?,
                l2: of(edges, plan.l2_dim)?,
                weights: of(weight_rows, plan.weight_numel)?,
            })
        };
        let (inputs, directions, results) = (operands()?, operands()?, operands()?);
        Ok(Self {
            kernel,
            stream: Stream::new(StreamFlags::NON_BLOCKING, None)?,
            operands: inputs,
            directions,
            results,
            l3_grad: of(nodes, plan.l3_dim)?,
            l3: of(nodes, plan.l3_dim)?,
            rows: DeviceBuffer::from_slice(&rows)?,
            cols: DeviceBuffer::from_slice(&cols)?,
            workspace: DeviceBuffer::from_slice(&vec![0; usize::try_from(plan.workspace_bytes)?])?,
            transpose_perm: DeviceBuffer::from_slice(&transpose_perm)?,
        })
    }

    /// Enqueues a call: of an order 0 to 2, or the forward call with one operand exchanged for its direction.
    fn enqueue(&mut self, call: Call) -> oeq_native::Result<()> {
        let stream = RawStream::of(&self.stream);
        let mut operands = self.operands.primal();
        match call {
            Call::Along(0) => operands.l1 = &self.directions.l1,
            Call::Along(1) => operands.l2 = &self.directions.l2,
            Call::Along(_) => operands.weights = &self.directions.weights,
            _ => {}
        }
        let (directions, results) = (self.directions.primal(), self.results.gradients());
        let (l3, l3_grad) = (&mut self.l3, &self.l3_grad);
        let graph = Graph {
            rows: &self.rows,
            cols: &self.cols,
            workspace: &mut self.workspace,
            transpose_perm: &self.transpose_perm,
        };
        // SAFETY: the stream and the buffers belong to device 0; the buffers outlive `self.stream`, whose end is waited for
        // before they are read, and columns and rows are nodes.
        unsafe {
            match (self.kernel, call) {
                (Kernel::TensorProduct(product), Call::Forward | Call::Along(_)) => {
                    product.forward(0, stream, operands.l1, operands.l2, operands.weights, l3)
                }
                (Kernel::TensorProduct(product), Call::Backward) => {
                    product.backward(0, stream, operands, l3_grad, results)
                }
                (Kernel::TensorProduct(product), Call::DoubleBackward) => {
                    product.double_backward(0, stream, operands, l3_grad, directions, results, l3)
                }
                (Kernel::Convolution(convolution), Call::Forward | Call::Along(_)) => {
                    convolution.forward(0, stream, operands, graph, l3)
                }
                (Kernel::Convolution(convolution), Call::Backward) => {
                    convolution.backward(0, stream, operands, l3_grad, graph, results)
                }
                (Kernel::Convolution(convolution), Call::DoubleBackward) => {
                    convolution.double_backward(0, stream, operands, l3_grad, directions, graph, results, l3)
                }
            }
        }
    }

    /// Runs a call, and reads its L3.
    fn l3_of(&mut self, call: Call) -> Outcome<Vec<f64>> {
        self.enqueue(call)?;
        self.stream.synchronize()?;
        read(&self.l3)
    }

    /// The products of each operand with the gradient for it, and the products of their norms.
    fn products(&self) -> Outcome<[(f64, f64); 3]> {
        let pairs = [
            (&self.operands.l1, &self.results.l1),
            (&self.operands.l2, &self.results.l2),
            (&self.operands.weights, &self.results.weights),
        ];
        let mut products = [(0.0, 0.0); 3];
        for ((operand, gradient), product) in pairs.into_iter().zip(&mut products) {
            let (operand, gradient) = (read(operand)?, read(gradient)?);
            *product = (dot(&operand, &gradient), norm(&operand) * norm(&gradient));
        }
        Ok(products)
    }

    fn run(mut self, tolerance: f64) -> Outcome<bool> {
        let g = read(&self.l3_grad)?;
        let mut errors = Vec::new();
        let mut whole = true;
        for round in 0..2 {
            // The second time every call site has a graph of its own.
            if round == 1 {
                for call in [Call::Forward, Call::Backward, Call::DoubleBackward] {
                    let nanoseconds = self.time(call)?;
                    let call = format!("{call:?}");
                    println!("  {call:<16} {nanoseconds:>8.0} ns of the host's time for each call");
                }
            }
            let forward = self.l3_of(Call::Forward)?;
            let value = dot(&g, &forward);
            self.enqueue(Call::Backward)?;
            self.stream.synchronize()?;
            errors.extend(self.products()?.map(|(product, norms)| (product - value).abs() / norms));

            let [a, b, c] = [self.l3_of(Call::Along(0))?, self.l3_of(Call::Along(1))?, self.l3_of(Call::Along(2))?];
            let l3_dgrad = self.l3_of(Call::DoubleBackward)?;
            let sum: Vec<f64> = a.iter().zip(&b).zip(&c).map(|((a, b), c)| a + b + c).collect();
            let apart: Vec<f64> = sum.iter().zip(&l3_dgrad).map(|(sum, found)| sum - found).collect();
            errors.push(norm(&apart) / norm(&sum));
            let [a, b, c] = [dot(&g, &a), dot(&g, &b), dot(&g, &c)];
            let expected = [b + c, a + c, a + b];
            errors
                .extend(self.products()?.iter().zip(expected).map(|((found, norms), sum)| (found - sum).abs() / norms));
            whole &= norm(&forward) > 0.0 && norm(&sum) > 0.0;
        }
        let worst = errors.iter().copied().fold(0.0, f64::max);
        let good = whole && errors.iter().all(|error| *error <= tolerance);
        println!(
            "  {} identities, worst {worst:.1e} of at most {tolerance:.0e}: {}",
            errors.len(),
            ["WRONG", "ok"][usize::from(good)]
        );
        Ok(good)
    }

    /// Nanoseconds that the host needs to enqueue a call: the median of a few samples.
    fn time(&mut self, call: Call) -> Outcome<f64> {
        let mut samples = Vec::new();
        for _ in 0..SAMPLES {
            let begun = Instant::now();
            for _ in 0..CALLS {
                self.enqueue(call)?;
            }
            samples.push(begun.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS));
            self.stream.synchronize()?;
        }
        samples.sort_by(f64::total_cmp);
        Ok(samples[SAMPLES / 2])
    }
}

#[derive(Debug, Clone, Copy)]
enum Call {
    Forward,
    Along(usize),
    Backward,
    DoubleBackward,
}

/// A graph of about as many edges, each there in both directions, sorted by row and then by column; last, the order of the
/// edges by column.
fn undirected(edges: usize, nodes: usize, random: &mut Random) -> (Vec<i32>, Vec<i32>, Vec<i32>) {
    let nodes = i32::try_from(nodes.max(1)).unwrap_or(i32::MAX);
    let mut pairs: Vec<(i32, i32)> = (0..edges / 2)
        .flat_map(|_| {
            let (a, b) = (random.below(nodes), random.below(nodes));
            [(a, b), (b, a)]
        })
        .collect();
    pairs.sort_unstable();
    pairs.dedup();
    let mut order: Vec<i32> = (0..).take(pairs.len()).collect();
    order.sort_by_key(|edge| pairs.get(edge.unsigned_abs() as usize).map(|(row, col)| (*col, *row)));
    let (rows, cols) = pairs.into_iter().unzip();
    (rows, cols, order)
}

fn read<T: DeviceCopy + Into<f64> + From<f32>>(buffer: &DeviceBuffer<T>) -> Outcome<Vec<f64>> {
    let mut values = vec![T::from(0.0); buffer.len()];
    buffer.copy_to(&mut values[..])?;
    Ok(values.into_iter().map(Into::into).collect())
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(a: &[f64]) -> f64 {
    dot(a, a).sqrt()
}

/// Numbers that look random: Knuth's linear congruential generator, of which the upper bits are used.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    fn below(&mut self, bound: i32) -> i32 {
        i32::try_from((i64::from(self.bits()) * i64::from(bound)) >> 32).unwrap_or_default()
    }

    /// Between -1 and 1.
    #[allow(clippy::cast_precision_loss, reason = "sixteen bits fit")]
    fn next(&mut self) -> f32 {
        (self.bits() >> 16) as f32 / 32768.0 - 1.0
    }
}
