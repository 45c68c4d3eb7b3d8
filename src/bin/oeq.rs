//! `oeq`: lists targets, looks into model files, and compiles what they hold.
//!
//! Results go to standard output, as text for people or with `--json` for programs; whatever is wrong goes to standard
//! error and makes the exit status 1. A reader that goes away is no error.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use oeq_native::compile::Target;
use oeq_native::compile::nvrtc::{Nvrtc, Program};
use oeq_native::compile::pool::Pool;
use oeq_native::compile::unit::Cut;
use oeq_native::config::{CompileUnits, Config};
use oeq_native::error::{Code, Error, Result};
use oeq_native::layout::Family;
use oeq_native::model::{self, Container, Found, Model, Survey};
use oeq_native::payload::{Dtype, KernelPlan, LaunchSize};
use oeq_native::registry::{self, Derivative};

#[path = "oeq/bundle.rs"]
mod bundle;

/// Looks into exported JAX models with OpenEquivariance kernels, and compiles these kernels.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the custom call targets.
    Targets,
    /// List the calls and kernels of model files.
    ///
    /// A model file is an artifact of jax.export, StableHLO bytecode or text, or a payload.
    Inspect {
        /// Model files; - is standard input.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Compile every kernel of model files concurrently, and tell the times.
    ///
    /// Kernels that several calls or files share are compiled once. The speed-up is the sum of all compile times, each
    /// taken while others ran, over the time that passed; --threads 1 tells what one at a time takes.
    Compile {
        /// Model files; - is standard input.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// Device architecture, for example `sm_90` or `sm_90a`; may be given several times.
        #[arg(long, required = true)]
        arch: Vec<Target>,
        /// Compilations at a time [default: `OEQ_COMPILE_THREADS`, else the cores available, at most 16].
        #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
        threads: Option<u16>,
        /// Compile whole programs instead of one unit per launch.
        #[arg(long)]
        whole: bool,
        /// Write a bundle of every unit that the models call, which needs no compiler where it is used.
        #[arg(long)]
        out: Option<PathBuf>,
    },
    /// Look into bundles of compiled kernels, and merge them.
    #[command(subcommand)]
    Bundle(bundle::BundleCommand),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut output = Output { json: arguments.json, failures: 0 };
    let done = match arguments.command {
        Command::Targets => targets(&output),
        Command::Inspect { files } => inspect(&mut output, &files),
        Command::Compile { files, arch, threads, whole, out } => {
            compile(&mut output, &files, &arch, threads, whole, out.as_deref())
        }
        Command::Bundle(command) => bundle::bundle(&mut output, &command),
    };
    if let Err(error) = done {
        output.complain(&error);
    }
    if output.failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Where results and complaints go.
struct Output {
    json: bool,
    failures: usize,
}

impl Output {
    /// Writes a result: `value` as JSON, or what `text` makes.
    fn write<T: Serialize>(&self, value: &T, text: impl FnOnce(&mut String) -> std::fmt::Result) -> Result<()> {
        let mut content = if self.json {
            serde_json::to_string_pretty(value).map_err(|error| Error::internal(format!("writing JSON: {error}")))?
        } else {
            let mut content = String::new();
            text(&mut content).map_err(|error| Error::internal(format!("writing text: {error}")))?;
            content
        };
        if self.json {
            content.push('\n');
        }
        let mut out = io::stdout().lock();
        match out.write_all(content.as_bytes()).and_then(|()| out.flush()) {
            // The reader has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(Error::internal(format!("writing to standard output: {error}"))),
            Ok(()) => Ok(()),
        }
    }

    /// Tells what is wrong. Nothing can be done about a standard error that is closed.
    fn complain(&mut self, what: &dyn std::fmt::Display) {
        self.failures += 1;
        let _ = writeln!(io::stderr().lock(), "oeq: {what}");
    }
}

// ---------------------------------------------------------------------------------------------------------- targets

#[derive(Serialize)]
struct TargetOut {
    name: &'static str,
    family: &'static str,
    /// `null`: the attribute `derivative` of each call tells.
    derivative: Option<usize>,
    stages: Vec<&'static str>,
}

fn targets(output: &Output) -> Result<()> {
    let out: Vec<TargetOut> = registry::table()?
        .entries
        .iter()
        .map(|entry| TargetOut {
            name: entry.descriptor.name,
            family: entry.descriptor.family.name,
            derivative: match entry.descriptor.derivative {
                Derivative::Order(order) => Some(order),
                Derivative::Attribute => None,
            },
            stages: entry.descriptor.stages().collect(),
        })
        .collect();
    output.write(&out, |text| {
        use std::fmt::Write;
        writeln!(text, "{:<22} {:<16} {:<10} stages", "target", "family", "derivative")?;
        for target in &out {
            let derivative = target.derivative.map_or("attribute".to_owned(), |order| order.to_string());
            writeln!(text, "{:<22} {:<16} {derivative:<10} {}", target.name, target.family, target.stages.join(" "))?;
        }
        Ok(())
    })
}

// ----------------------------------------------------------------------------------------------------------- models

/// A model file that could be read.
struct File {
    name: String,
    model: Model,
    survey: Survey,
}

/// Reads model files; complains about those that cannot be.
fn load(output: &mut Output, files: &[PathBuf]) -> Vec<File> {
    let mut loaded = Vec::new();
    for path in files {
        let name = path.display().to_string();
        let read = || -> Result<File> {
            let mut bytes = Vec::new();
            if name == "-" {
                io::stdin().lock().read_to_end(&mut bytes)
            } else {
                fs::File::open(path).and_then(|mut file| file.read_to_end(&mut bytes))
            }
            .map_err(|error| Error::new(Code::NotFound, error.to_string()))?;
            let model = model::read(&bytes)?;
            let survey = model::survey(&model)?;
            Ok(File { name: name.clone(), model, survey })
        };
        match read() {
            Ok(file) => loaded.push(file),
            Err(error) => output.complain(&format_args!("{name}: {error}")),
        }
    }
    for file in &loaded {
        for kernel in &file.survey.kernels {
            if let Err(error) = &kernel.plan {
                output.complain(&format_args!(
                    "{}: {} kernel of {} bytes{}: {error}",
                    file.name,
                    kernel.family.name,
                    kernel.bytes,
                    kernel.hash.map_or(String::new(), |hash| format!(" with hash {hash}")),
                ));
            }
        }
        for site in &file.survey.sites {
            let wrong = site.meaning.as_ref().err().or(site.problem.as_ref());
            if let Some(error) = wrong {
                output.complain(&format_args!("{}: call {} of {}: {error}", file.name, site.call, site.target.name));
            }
        }
    }
    loaded
}

#[derive(Serialize)]
struct InspectOut<'a> {
    file: &'a str,
    container: ContainerOut<'a>,
    /// `read`, or `scanned` where the bytecode is newer than known: then calls are not known.
    found: &'static str,
    calls: Vec<CallOut<'a>>,
    kernels: Vec<KernelOut<'a>>,
    /// Custom calls of other people's targets, with how many operations of each there are.
    other_calls: BTreeMap<&'a str, usize>,
    payload_bytes: PayloadBytes,
}

#[derive(Serialize)]
struct PayloadBytes {
    /// Of every payload, once.
    unique: u64,
    /// Of the payloads as often as call sites name them.
    referenced: u64,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum ContainerOut<'a> {
    JaxExport {
        function: &'a str,
        platforms: &'a [String],
        devices: u32,
        calling_convention_version: u16,
        serialization_version: u16,
        /// The model's module, then those of its derivatives.
        modules: Vec<ModuleOut<'a>>,
    },
    Bytecode {
        #[serde(flatten)]
        module: ModuleOut<'a>,
    },
    Text,
    Payload,
}

#[derive(Serialize)]
struct ModuleOut<'a> {
    bytecode_version: u64,
    producer: &'a str,
    bytes: usize,
    dialects: &'a [String],
}

#[derive(Serialize)]
struct CallOut<'a> {
    target: &'a str,
    family: &'static str,
    derivative: Option<usize>,
    /// An index into `kernels`.
    kernel: Option<usize>,
    /// How often the operation is reached from the entry of its module.
    sites: u64,
    function: Option<&'a str>,
    module: usize,
    api_version: i64,
    operands: Vec<String>,
    results: Vec<String>,
    error: Option<&'a str>,
}

#[derive(Serialize)]
struct KernelOut<'a> {
    family: &'static str,
    bytes: usize,
    /// `json` or `dictionaries`.
    form: &'static str,
    hash: Option<i64>,
    /// Operations that name it, and call sites.
    calls: usize,
    sites: u64,
    plan: Option<PlanOut>,
    error: Option<&'a str>,
}

#[derive(Serialize)]
struct PlanOut {
    source_bytes: usize,
    l1_dim: u64,
    l2_dim: u64,
    l3_dim: u64,
    weight_numel: u64,
    shared_weights: bool,
    irrep_dtype: &'static str,
    weight_dtype: &'static str,
    index_dtype: Option<&'static str>,
    deterministic: bool,
    workspace_bytes: u64,
    forward: LaunchOut,
    backward: LaunchOut,
    double_backward: LaunchOut,
    entry_points: Vec<String>,
}

#[derive(Serialize)]
struct LaunchOut {
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
}

impl From<LaunchSize> for LaunchOut {
    fn from(size: LaunchSize) -> Self {
        Self { blocks: size.blocks, threads: size.threads, shared_bytes: size.shared_bytes }
    }
}

impl PlanOut {
    fn of(plan: &KernelPlan) -> Self {
        let entries = oeq_native::source::entry_points(&plan.source).unwrap_or_default();
        Self {
            source_bytes: plan.source.len(),
            l1_dim: plan.l1_dim,
            l2_dim: plan.l2_dim,
            l3_dim: plan.l3_dim,
            weight_numel: plan.weight_numel,
            shared_weights: plan.shared_weights,
            irrep_dtype: plan.irrep_dtype.name(),
            weight_dtype: plan.weight_dtype.name(),
            index_dtype: plan.index_dtype.map(Dtype::name),
            deterministic: plan.deterministic,
            workspace_bytes: plan.workspace_bytes,
            forward: plan.forward.into(),
            backward: plan.backward.into(),
            double_backward: plan.double_backward.into(),
            entry_points: entries.into_iter().map(|entry| entry.name).collect(),
        }
    }
}

impl<'a> ModuleOut<'a> {
    fn of(module: &'a model::Bytecode) -> Self {
        Self {
            bytecode_version: module.version,
            producer: &module.producer,
            bytes: module.bytes,
            dialects: &module.dialects,
        }
    }
}

impl<'a> InspectOut<'a> {
    fn of(file: &'a File) -> Self {
        let File { name, model, survey } = file;
        let container = match &model.container {
            Container::Export(export) => ContainerOut::JaxExport {
                function: &export.function,
                platforms: &export.platforms,
                devices: export.devices,
                calling_convention_version: export.calling_convention_version,
                serialization_version: export.serialization_version,
                modules: export.modules.iter().map(ModuleOut::of).collect(),
            },
            Container::Bytecode(module) => ContainerOut::Bytecode { module: ModuleOut::of(module) },
            Container::Payload => ContainerOut::Payload,
            _ => ContainerOut::Text,
        };
        let mut kernels: Vec<KernelOut> = survey
            .kernels
            .iter()
            .map(|kernel| KernelOut {
                family: kernel.family.name,
                bytes: kernel.bytes,
                form: if kernel.dictionaries { "dictionaries" } else { "json" },
                hash: kernel.hash,
                calls: 0,
                sites: 0,
                plan: kernel.plan.as_ref().ok().map(PlanOut::of),
                error: kernel.plan.as_ref().err().map(Error::message),
            })
            .collect();
        let mut calls = Vec::with_capacity(survey.sites.len());
        for site in &survey.sites {
            let call = &model.calls[site.call];
            let meaning = site.meaning.as_ref().ok().copied();
            if let Some((_, kernel)) = meaning {
                kernels[kernel].calls += 1;
                kernels[kernel].sites = kernels[kernel].sites.saturating_add(call.sites);
            }
            calls.push(CallOut {
                target: &call.target,
                family: site.target.family.name,
                derivative: meaning.map(|(order, _)| order),
                kernel: meaning.map(|(_, kernel)| kernel),
                sites: call.sites,
                function: call.function.as_deref(),
                module: call.module,
                api_version: call.api_version,
                operands: call.operands.iter().map(ToString::to_string).collect(),
                results: call.results.iter().map(ToString::to_string).collect(),
                error: site.meaning.as_ref().err().or(site.problem.as_ref()).map(Error::message),
            });
        }
        let mut other_calls = BTreeMap::new();
        for &other in &survey.others {
            *other_calls.entry(&*model.calls[other].target).or_insert(0) += 1;
        }
        Self {
            file: name,
            container,
            found: if model.found == Found::Scanned { "scanned" } else { "read" },
            calls,
            kernels,
            other_calls,
            payload_bytes: PayloadBytes { unique: survey.unique_bytes, referenced: survey.referenced_bytes },
        }
    }

    fn text(&self, text: &mut String) -> std::fmt::Result {
        use std::fmt::Write;
        write!(text, "{}: ", self.file)?;
        let module = |text: &mut String, module: &ModuleOut<'_>| {
            writeln!(
                text,
                "MLIR bytecode {} by {}, {} bytes, dialects {}",
                module.bytecode_version,
                module.producer,
                module.bytes,
                module.dialects.join(" ")
            )
        };
        match &self.container {
            ContainerOut::JaxExport { function, platforms, devices, calling_convention_version, modules, .. } => {
                writeln!(
                    text,
                    "jax.export artifact of {function} for {} on {devices} device(s), calling convention \
                     {calling_convention_version}",
                    platforms.join(" ")
                )?;
                for (order, one) in modules.iter().enumerate() {
                    let what = if order == 0 { "model".to_owned() } else { format!("derivative {order}") };
                    write!(text, "  {what}: ")?;
                    module(text, one)?;
                }
            }
            ContainerOut::Bytecode { module: one } => module(text, one)?,
            ContainerOut::Text => writeln!(text, "StableHLO text")?,
            ContainerOut::Payload => writeln!(text, "payload")?,
        }
        if self.found == "scanned" {
            writeln!(text, "  the bytecode is newer than known: payloads were looked for, calls are not known")?;
        }
        writeln!(text, "  calls: {}", self.calls.len())?;
        for call in &self.calls {
            let kernel = call.kernel.map_or("?".to_owned(), |kernel| kernel.to_string());
            let module = if call.module == 0 { String::new() } else { format!(" of derivative {}", call.module) };
            writeln!(
                text,
                "    {} (derivative {}), kernel {kernel}, {} site(s) in {}{module}",
                call.target,
                call.derivative.map_or("?".to_owned(), |order| order.to_string()),
                call.sites,
                call.function.unwrap_or("?"),
            )?;
            writeln!(text, "      {} -> {}", call.operands.join(" "), call.results.join(" "))?;
        }
        writeln!(text, "  kernels: {}", self.kernels.len())?;
        for (index, kernel) in self.kernels.iter().enumerate() {
            let hash = kernel.hash.map_or(String::new(), |hash| format!(", hash {hash}"));
            writeln!(
                text,
                "    {index}: {}, {} bytes ({}){hash}, named by {} call(s) at {} site(s)",
                kernel.family, kernel.bytes, kernel.form, kernel.calls, kernel.sites
            )?;
            match (&kernel.plan, kernel.error) {
                (Some(plan), _) => plan.text(text)?,
                (None, Some(error)) => writeln!(text, "      {error}")?,
                (None, None) => {}
            }
        }
        let PayloadBytes { unique, referenced } = self.payload_bytes;
        writeln!(text, "  payload bytes: {unique} unique, {referenced} referenced")?;
        for (target, count) in &self.other_calls {
            writeln!(text, "  other custom calls: {count} of {target}")?;
        }
        Ok(())
    }
}

impl PlanOut {
    fn text(&self, text: &mut String) -> std::fmt::Result {
        use std::fmt::Write;
        let index = self.index_dtype.map_or(String::new(), |index| format!(", {index} indices"));
        let determinism = if self.deterministic { "deterministic" } else { "atomic" };
        let workspace = match self.index_dtype {
            Some(_) => format!("; {determinism}, workspace {} bytes", self.workspace_bytes),
            None => String::new(), // A tensor product has neither.
        };
        let weights = if self.shared_weights { "shared" } else { "per row" };
        writeln!(
            text,
            "      {}{index}; L1 {}, L2 {}, L3 {}; {} weights ({}, {weights}){workspace}",
            self.irrep_dtype, self.l1_dim, self.l2_dim, self.l3_dim, self.weight_numel, self.weight_dtype,
        )?;
        let launches = [("forward", &self.forward), ("backward", &self.backward), ("double", &self.double_backward)];
        write!(text, "      blocks x threads, shared bytes:")?;
        for (name, LaunchOut { blocks, threads, shared_bytes }) in launches {
            write!(text, " {name} {blocks} x {threads}, {shared_bytes};")?;
        }
        writeln!(text, "\n      entry points: {}", self.entry_points.join(" "))
    }
}

fn inspect(output: &mut Output, files: &[PathBuf]) -> Result<()> {
    let files = load(output, files);
    let out: Vec<InspectOut> = files.iter().map(InspectOut::of).collect();
    output.write(&out, |text| out.iter().try_for_each(|file| file.text(text)))
}

// ---------------------------------------------------------------------------------------------------------- compile

/// One kernel for one architecture.
struct Job<'a> {
    file: &'a str,
    family: &'static Family,
    plan: &'a KernelPlan,
    bytes: usize,
    hash: Option<i64>,
    architecture: Target,
    cut: Cut,
}

/// What a worker reports: which unit of which job, how it went, how long it took, and who did it.
struct Report {
    job: usize,
    unit: usize,
    outcome: Result<usize>,
    time: Duration,
    worker: ThreadId,
}

#[derive(Serialize)]
struct CompileOut<'a> {
    /// From the first submission to the last result.
    wall_s: f64,
    /// Of all compilations, each timed by itself while others ran.
    sum_s: f64,
    /// Threads that compiled.
    workers: usize,
    speed_up: f64,
    nvrtc: String,
    kernels: Vec<CompiledOut<'a>>,
}

#[derive(Serialize)]
struct CompiledOut<'a> {
    family: &'static str,
    bytes: usize,
    seconds: f64,
    arch: String,
    hash: Option<i64>,
    file: &'a str,
    image_bytes: usize,
    units: Vec<UnitOut>,
    error: Option<String>,
}

#[derive(Serialize)]
struct UnitOut {
    entry_points: Vec<&'static str>,
    seconds: f64,
}

fn compile(
    output: &mut Output,
    files: &[PathBuf],
    architectures: &[Target],
    threads: Option<u16>,
    whole: bool,
    out: Option<&Path>,
) -> Result<()> {
    let config = Config::from_environment()?;
    let files = load(output, files);
    let policy = if whole { CompileUnits::Whole } else { config.compile_units };
    if let Some(out) = out {
        let nvrtc = Nvrtc::find(config.nvrtc.as_deref())?;
        let threads = threads.map_or(config.compile_threads, usize::from);
        return bundle::compile(output, &files, architectures, policy, nvrtc, threads, out);
    }
    let jobs = jobs(&files, architectures, policy);
    if jobs.is_empty() {
        return Err(Error::invalid("no kernel to compile"));
    }
    let nvrtc = Arc::new(Nvrtc::find(config.nvrtc.as_deref())?);
    let threads = threads.map_or(config.compile_threads, usize::from);
    let progress = progress(output, jobs.iter().map(|job| job.cut.units.len()).sum());
    let begin = Instant::now();
    let reports = run(&jobs, &nvrtc, threads, &progress)?;
    let wall_s = begin.elapsed().as_secs_f64();
    progress.finish_and_clear();

    let workers = reports.iter().map(|report| report.worker).collect::<HashSet<_>>().len();
    let mut kernels: Vec<CompiledOut> = jobs.iter().map(CompiledOut::of).collect();
    for report in reports {
        let kernel = &mut kernels[report.job];
        let seconds = report.time.as_secs_f64();
        kernel.seconds += seconds;
        kernel.units[report.unit].seconds = seconds;
        match report.outcome {
            Ok(bytes) => kernel.image_bytes += bytes,
            Err(error) => {
                output.complain(&format_args!("{}: {} kernel: {error}", kernel.file, kernel.family));
                kernel.error.get_or_insert_with(|| error.message().to_owned());
            }
        }
    }
    let sum_s: f64 = kernels.iter().map(|kernel| kernel.seconds).sum();
    let (major, minor) = nvrtc.version();
    let out = CompileOut {
        wall_s,
        sum_s,
        workers,
        speed_up: if wall_s > 0.0 { sum_s / wall_s } else { 1.0 },
        nvrtc: format!("{major}.{minor} ({})", nvrtc.path().display()),
        kernels,
    };
    output.write(&out, |text| out.text(text))
}

/// Every kernel of the files once, for every architecture once.
fn jobs<'a>(files: &'a [File], architectures: &[Target], policy: CompileUnits) -> Vec<Job<'a>> {
    let mut seen = HashSet::new();
    let mut jobs = Vec::new();
    for file in files {
        for kernel in &file.survey.kernels {
            let Ok(plan) = &kernel.plan else { continue }; // Complained about already.
            for &architecture in architectures {
                if seen.insert((kernel.family.name, &*kernel.identity, architecture)) {
                    jobs.push(Job {
                        file: &file.name,
                        family: kernel.family,
                        plan,
                        bytes: kernel.bytes,
                        hash: kernel.hash,
                        architecture,
                        cut: Cut::of(kernel.family, plan, policy),
                    });
                }
            }
        }
    }
    jobs
}

fn progress(output: &Output, units: usize) -> ProgressBar {
    let bar = ProgressBar::new(units as u64);
    if output.json || !io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("{elapsed} [{bar:40}] {pos}/{len} {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message("units compiled");
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// Compiles everything, the largest first.
fn run(jobs: &[Job<'_>], nvrtc: &Arc<Nvrtc>, threads: usize, progress: &ProgressBar) -> Result<Vec<Report>> {
    let pool = Pool::new(threads);
    let (send, receive) = mpsc::channel();
    let mut expected = 0;
    for (job_index, job) in jobs.iter().enumerate() {
        for (unit_index, unit) in job.cut.units.iter().enumerate() {
            let (send, nvrtc) = (send.clone(), Arc::clone(nvrtc));
            let source = job.cut.text(unit, job.plan).into_owned();
            let name = format!("{}_{job_index}_{unit_index}.cu", job.family.name);
            let entries: Vec<&'static str> = unit.entries.iter().map(|entry| entry.name).collect();
            let architecture = job.architecture;
            let weight = (source.len() as u64).saturating_mul(u64::from(unit.cost));
            let work = Box::new(move || {
                let begin = Instant::now();
                let program = Program {
                    name: &name,
                    source: &source,
                    architecture: architecture.base,
                    entry_points: &entries,
                    extra_options: &architecture.options(),
                };
                let outcome = nvrtc.compile(&program).map(|image| image.code.len());
                let (time, worker) = (begin.elapsed(), std::thread::current().id());
                // The receiver is only gone when the program is about to end.
                let _ = send.send(Report { job: job_index, unit: unit_index, outcome, time, worker });
            });
            expected += 1;
            if let Err(work) = pool.submit(weight, work) {
                work(); // No thread could be started.
            }
        }
    }
    drop(send);
    let mut reports = Vec::with_capacity(expected);
    while let Ok(report) = receive.recv() {
        progress.inc(1);
        reports.push(report);
    }
    if reports.len() < expected {
        return Err(Error::internal(format!("{} of {expected} compilations ended without a result", reports.len())));
    }
    Ok(reports)
}

impl<'a> CompiledOut<'a> {
    fn of(job: &Job<'a>) -> Self {
        Self {
            family: job.family.name,
            bytes: job.bytes,
            seconds: 0.0,
            arch: job.architecture.to_string(),
            hash: job.hash,
            file: job.file,
            image_bytes: 0,
            units: job
                .cut
                .units
                .iter()
                .map(|unit| UnitOut {
                    entry_points: unit.entries.iter().map(|entry| entry.name).collect(),
                    seconds: 0.0,
                })
                .collect(),
            error: None,
        }
    }
}

impl CompileOut<'_> {
    fn text(&self, text: &mut String) -> std::fmt::Result {
        use std::fmt::Write;
        writeln!(text, "NVRTC {}", self.nvrtc)?;
        writeln!(text, "{:>8} {:>8} {:>10} {:>6}  {:<15} entry points", "seconds", "bytes", "image", "arch", "family")?;
        for kernel in &self.kernels {
            let units: Vec<String> = kernel
                .units
                .iter()
                .map(|unit| format!("{} {:.2}", unit.entry_points.join("+"), unit.seconds))
                .collect();
            writeln!(
                text,
                "{:>8.2} {:>8} {:>10} {:>6}  {:<15} {}{}",
                kernel.seconds,
                kernel.bytes,
                kernel.image_bytes,
                kernel.arch,
                kernel.family,
                units.join(", "),
                if kernel.error.is_some() { " FAILED" } else { "" }
            )?;
        }
        writeln!(
            text,
            "{} kernel(s), {} worker(s): wall {:.2} s, sum {:.2} s, speed-up {:.2}",
            self.kernels.len(),
            self.workers,
            self.wall_s,
            self.sum_s,
            self.speed_up
        )
    }
}
