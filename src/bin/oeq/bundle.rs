//! `oeq compile --out` and `oeq bundle`: compiled kernels in files that need no compiler.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use clap::Subcommand;
use serde::Serialize;

use oeq_native::compile::bundle::{Builder, Bundle};
use oeq_native::compile::codec::Stored;
use oeq_native::compile::images::label;
use oeq_native::compile::key::digest;
use oeq_native::compile::nvrtc::{Nvrtc, Program};
use oeq_native::compile::pool::Pool;
use oeq_native::compile::unit::Cut;
use oeq_native::compile::{Key, Target};
use oeq_native::config::CompileUnits;
use oeq_native::error::{Error, Result};
use oeq_native::model::Survey;

use super::{File, Output, progress};

#[derive(Subcommand)]
pub(crate) enum BundleCommand {
    /// List the units in bundles.
    List {
        /// Bundles.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Check every byte of bundles.
    Verify {
        /// Bundles.
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
    /// Put several bundles into one. Where two have the same unit, the first one's is taken.
    Merge {
        /// Bundles.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// The bundle to write.
        #[arg(long)]
        out: PathBuf,
    },
}

pub(crate) fn bundle(output: &mut Output, command: &BundleCommand) -> Result<()> {
    match command {
        BundleCommand::List { files } => list(output, files),
        BundleCommand::Verify { files } => {
            for path in files {
                match Bundle::open(path).and_then(|bundle| bundle.verify().map(|()| bundle.len())) {
                    Ok(units) => output.write(&VerifiedOut { file: path, units }, |text| {
                        use std::fmt::Write;
                        writeln!(text, "{}: {units} units, whole", path.display())
                    })?,
                    Err(error) => output.complain(&error),
                }
            }
            Ok(())
        }
        BundleCommand::Merge { files, out } => {
            let mut builder = Builder::default();
            for path in files {
                for stored in Bundle::open(path)?.images() {
                    builder.add(stored?);
                }
            }
            write(output, &builder, out)
        }
    }
}

#[derive(Serialize)]
struct VerifiedOut<'a> {
    file: &'a Path,
    units: usize,
}

#[derive(Serialize)]
struct BundleOut<'a> {
    file: &'a Path,
    producer: Option<String>,
    /// Sections of later versions, which are skipped.
    unknown_sections: usize,
    units: Vec<UnitOut>,
}

#[derive(Serialize)]
struct UnitOut {
    key: String,
    family: String,
    target: String,
    nvrtc: String,
    /// `cubin` or `ptx`.
    kind: &'static str,
    bytes: usize,
    entry_points: Vec<String>,
}

impl From<Stored> for UnitOut {
    fn from(stored: Stored) -> Self {
        Self {
            key: stored.key.to_string(),
            kind: stored.image.kind().name(),
            bytes: stored.image.code.len(),
            nvrtc: format!("{}.{}", stored.compiler.0, stored.compiler.1),
            family: stored.family,
            target: stored.target,
            entry_points: stored.image.symbols.into_iter().map(|(entry, _)| entry).collect(),
        }
    }
}

fn list(output: &mut Output, files: &[PathBuf]) -> Result<()> {
    let mut out = Vec::new();
    for file in files {
        let read = || -> Result<BundleOut> {
            let bundle = Bundle::open(file)?;
            let units = bundle.images().map(|stored| stored.map(UnitOut::from)).collect::<Result<_>>()?;
            Ok(BundleOut { file, producer: bundle.producer()?, unknown_sections: bundle.unknown_sections(), units })
        };
        match read() {
            Ok(bundle) => out.push(bundle),
            Err(error) => output.complain(&error),
        }
    }
    output.write(&out, |text| {
        use std::fmt::Write;
        for BundleOut { file, producer, unknown_sections, units } in &out {
            writeln!(
                text,
                "{}: {} units, by {}",
                file.display(),
                units.len(),
                producer.as_deref().unwrap_or("unknown")
            )?;
            if *unknown_sections > 0 {
                writeln!(text, "  {unknown_sections} sections of a later version are skipped")?;
            }
            for unit in units {
                writeln!(
                    text,
                    "  {} {:<7} {:<5} {:>8} NVRTC {:<5} {}/{}",
                    &unit.key[..12],
                    unit.target,
                    unit.kind,
                    unit.bytes,
                    unit.nvrtc,
                    unit.family,
                    unit.entry_points.join("+")
                )?;
            }
        }
        Ok(())
    })
}

#[derive(Serialize)]
struct WrittenOut<'a> {
    file: &'a Path,
    units: usize,
    bytes: u64,
}

fn write(output: &Output, builder: &Builder, out: &Path) -> Result<()> {
    let written = WrittenOut { file: out, units: builder.len(), bytes: builder.write(out)? };
    output.write(&written, |text| {
        use std::fmt::Write;
        writeln!(text, "{}: {} units, {} bytes", out.display(), written.units, written.bytes)
    })
}

/// A unit that a model calls.
struct Job<'a> {
    file: &'a str,
    family: &'static str,
    entry_points: Vec<&'static str>,
    source: String,
    target: Target,
    weight: u64,
}

/// Compiles every unit that the models call, and writes them into a bundle. Nothing is written if anything fails: who
/// relies on a bundle relies on all of it.
pub(crate) fn compile(
    output: &mut Output,
    files: &[File],
    targets: &[Target],
    policy: CompileUnits,
    nvrtc: Nvrtc,
    threads: usize,
    out: &Path,
) -> Result<()> {
    if output.failures > 0 {
        return Err(Error::invalid(format!("{}: not written", out.display())));
    }
    let jobs = jobs(files, targets, policy);
    if jobs.is_empty() {
        return Err(Error::invalid("no kernel to compile"));
    }
    let (major, minor) = nvrtc.version();
    let number = |part| u16::try_from(part).unwrap_or_default();
    let compiler = (number(major), number(minor));
    let nvrtc = Arc::new(nvrtc);
    let pool = Pool::new(threads);
    let progress = progress(output, jobs.len());
    let begin = Instant::now();
    let (send, receive) = mpsc::channel();
    let count = jobs.len();
    for (key, job) in jobs {
        let (send, nvrtc, weight) = (send.clone(), Arc::clone(&nvrtc), job.weight);
        let unit = label(job.family, &job.entry_points, job.target);
        let place = format!("{}: {unit}", job.file);
        let Job { family, entry_points, source, target, .. } = job;
        let work = Box::new(move || {
            let program = Program {
                name: &format!("oeq_{family}.cu"),
                source: &source,
                architecture: target.base,
                entry_points: &entry_points,
                extra_options: &target.options(),
            };
            let begin = Instant::now();
            let stored = nvrtc.compile(&program).map(|image| {
                let (family, target) = (family.to_owned(), target.to_string());
                Stored { key, family, target, compiler, image }
            });
            // The receiver is only gone when the program is about to end.
            let _ = send.send((unit, place, begin.elapsed(), stored));
        });
        if let Err(work) = pool.submit(weight, work) {
            work(); // No thread could be started.
        }
    }
    drop(send);
    let mut builder = Builder::default();
    let (mut done, mut seconds) = (0, 0.0);
    while let Ok((unit, place, time, stored)) = receive.recv() {
        done += 1;
        seconds += time.as_secs_f64();
        progress.set_message(unit);
        progress.inc(1);
        match stored {
            Ok(stored) => drop(builder.add(stored)),
            Err(error) => output.complain(&error.context(place)),
        }
    }
    progress.finish_and_clear();
    if done < count || output.failures > 0 {
        return Err(Error::invalid(format!("{}: not written", out.display())));
    }
    let written = CompiledOut {
        file: out,
        units: builder.len(),
        bytes: builder.write(out)?,
        wall_s: begin.elapsed().as_secs_f64(),
        sum_s: seconds,
        nvrtc: format!("{major}.{minor} ({})", nvrtc.path().display()),
    };
    output.write(&written, |text| {
        use std::fmt::Write;
        let CompiledOut { units, bytes, wall_s, sum_s, nvrtc, .. } = &written;
        writeln!(text, "NVRTC {nvrtc}")?;
        writeln!(text, "{}: {units} units, {bytes} bytes; wall {wall_s:.2} s, sum {sum_s:.2} s", out.display())
    })
}

#[derive(Serialize)]
struct CompiledOut<'a> {
    file: &'a Path,
    units: usize,
    bytes: u64,
    wall_s: f64,
    sum_s: f64,
    nvrtc: String,
}

/// Every unit that the models call, once for each target.
fn jobs<'a>(files: &'a [File], targets: &[Target], policy: CompileUnits) -> BTreeMap<Key, Job<'a>> {
    let mut jobs = BTreeMap::new();
    for file in files {
        for (index, kernel) in file.survey.kernels.iter().enumerate() {
            let Ok(plan) = &kernel.plan else { continue }; // Complained about already.
            let cut = Cut::of(kernel.family, plan, policy);
            let payload = digest(&kernel.identity);
            for order in orders(&file.survey, index, kernel.family.calls.len()) {
                for launch in kernel.family.calls[order].launches {
                    let unit = &cut.units[cut.unit_of(launch, plan)];
                    let entry_points: Vec<&'static str> = unit.entries.iter().map(|entry| entry.name).collect();
                    for &target in targets {
                        let key = Key::new(kernel.family.name, &payload, &entry_points, target);
                        jobs.entry(key).or_insert_with(|| Job {
                            file: &file.name,
                            family: kernel.family.name,
                            entry_points: entry_points.clone(),
                            source: cut.text(unit, plan).into_owned(),
                            target,
                            weight: plan.source.len() as u64 * u64::from(unit.cost),
                        });
                    }
                }
            }
        }
    }
    jobs
}

/// The derivative orders in which a model calls a kernel; all of them where the calls are not known.
fn orders(survey: &Survey, kernel: usize, count: usize) -> Vec<usize> {
    let meanings = survey.sites.iter().filter_map(|site| site.meaning.as_ref().ok());
    let mut orders: Vec<usize> = meanings.filter(|(_, of)| *of == kernel).map(|(order, _)| *order).collect();
    orders.sort_unstable();
    orders.dedup();
    if orders.is_empty() { (0..count).collect() } else { orders }
}
