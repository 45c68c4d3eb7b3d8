//! Runs a model with OpenEquivariance kernels in a PJRT plugin: no Python in the process, no XLA linked in.
//!
//! usage: `native_host PLUGIN.so MODEL [INPUT.npy ...] [--repeat N [--rounds]] [--out FOLDER] [--client NAME=VALUE ...]
//! [--platform NAME] [--door NAME | --symbols LIBRARY.so]`
//!
//! MODEL is an artifact of `jax.export`, `StableHLO` bytecode or `StableHLO` text. Inputs are the arguments of the
//! exported function, in order. Outputs are written as `output_0.npy` and so on. A connector does the same five things:
//! open the plugin, register (before or after a client exists), compile, upload, run. `native_host.cpp` does them in
//! C++.
//!
//! `--repeat` times N steps after the first. With `--rounds` a round of N steps is run for each line that comes on
//! standard input, until it ends, so that several hosts can take turns on one device.
//!
//! `--client` is an option of the plugin's clients. GPU plugins take `preallocate=false` and `memory_fraction=0.2`;
//! without either a client takes three quarters of the device's memory at once, which processes that share a GPU cannot
//! do.
//!
//! `--door` (`api`, `gpu-extension`, `execute-only`) takes one way of registering instead of the best. `--symbols
//! LIBRARY.so` does what hosts do that are given a library and a symbol per target: it registers the library's plain
//! names alone.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program that tells something")]

mod npy;
mod pjrt;

use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use libloading::Library;
use npy::Array;
use oeq_native::Platform;
use oeq_native::xla::api::Api;
use oeq_native::xla::ffi;
use oeq_native::xla::register::Door;
use pjrt::{Buffer, Client, Executable, Inputs, Result, Setting};

struct Options {
    plugin: PathBuf,
    model: PathBuf,
    inputs: Vec<PathBuf>,
    repeat: usize,
    rounds: bool,
    out: Option<PathBuf>,
    client: Vec<(String, Setting)>,
    platform: Option<String>,
    door: Option<Door>,
    symbols: Option<PathBuf>,
}

const USAGE: &str = "usage: native_host PLUGIN.so MODEL [INPUT.npy ...] [--repeat N [--rounds]] [--out FOLDER] \
                     [--client NAME=VALUE ...] [--platform NAME] [--door api|gpu-extension|execute-only | \
                     --symbols LIBRARY.so]";

fn options() -> Result<Options> {
    let (mut positional, mut client) = (Vec::new(), Vec::new());
    let (mut repeat, mut rounds, mut out, mut platform, mut door, mut symbols) = (0, false, None, None, None, None);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} takes a value\n{USAGE}"));
        match argument.as_str() {
            "--repeat" => repeat = value()?.parse()?,
            "--rounds" => rounds = true,
            "--client" => {
                let (name, setting) =
                    value()?.split_once('=').map(|(n, v)| (n.to_owned(), Setting::parse(v))).ok_or(USAGE)?;
                client.push((name, setting));
            }
            "--out" => out = Some(value()?.into()),
            "--platform" => platform = Some(value()?),
            "--symbols" => symbols = Some(value()?.into()),
            "--door" => {
                door = Some(match value()?.as_str() {
                    "api" => Door::Api,
                    "gpu-extension" => Door::GpuExtension,
                    "execute-only" => Door::ExecuteOnly,
                    other => return Err(format!("no door is named {other}\n{USAGE}").into()),
                });
            }
            _ if argument.starts_with("--") => return Err(format!("unknown option {argument}\n{USAGE}").into()),
            _ => positional.push(PathBuf::from(argument)),
        }
    }
    if positional.len() < 2 {
        return Err(USAGE.into());
    }
    let inputs = positional.split_off(2);
    let model = positional.remove(1);
    Ok(Options { plugin: positional.remove(0), model, inputs, repeat, rounds, out, client, platform, door, symbols })
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let options = options()?;
    let mut clock = Instant::now();
    let mut lap = || std::mem::replace(&mut clock, Instant::now()).elapsed();

    let plugin = pjrt::Plugin::open(&options.plugin)?;
    println!("opened      {} in {}", options.plugin.display(), milliseconds(lap()));

    plugin.initialize()?;
    let client = Client::new(plugin, &options.client)?;
    println!("client      of platform {} in {}", client.platform, milliseconds(lap()));

    // This may as well come first: before a client exists, "CUDA" is said instead of the client's platform.
    let platform = Platform::parse(options.platform.as_ref().unwrap_or(&client.platform))?;
    // SAFETY: the plugin's own table; the plugin is never unloaded.
    let registry = unsafe { oeq_native::Plugin::from_raw(plugin.api().cast())? };
    let (count, door) = if let Some(library) = &options.symbols {
        (register_symbols(library, registry.ffi_api()?, platform)?, "plain symbols")
    } else {
        let report = match options.door {
            None => registry.register(platform)?,
            Some(door) => registry.register_by(door, platform)?,
        };
        report.check()?;
        (report.targets.len(), report.door.name())
    };
    println!("registered  {count} targets for {} through the {door} in {}", platform.name(), milliseconds(lap()));

    let file = std::fs::read(&options.model)?;
    let model = Model::of(&file)?;
    let executable = client.compile(model.code)?;
    println!("compiled    {} in {}", options.model.display(), milliseconds(lap()));

    let arrays = options.inputs.iter().map(|path| Array::read(path)).collect::<Result<Vec<_>>>()?;
    let mut arguments = Vec::new();
    if model.platforms.len() > 1 {
        // A model for several platforms is told which one it runs on.
        let known = |name: &String| Platform::parse(name).is_ok_and(|p| Platform::parse(&client.platform) == Ok(p));
        let index = model.platforms.iter().position(known).ok_or("the model was not exported for this platform")?;
        arguments.push(client.upload(4, &[], &i32::try_from(index)?.to_le_bytes())?);
    }
    for (index, array) in arrays.iter().enumerate() {
        // Arguments that the function does not use are not in the module.
        if model.kept.as_ref().is_none_or(|kept| kept.contains(&index)) {
            arguments.push(client.upload(array.kind, &array.dimensions, &array.data)?);
        }
    }
    println!("uploaded    {} inputs in {}", arguments.len(), milliseconds(lap()));

    let inputs = Inputs::new(arguments);
    let mut outputs = executable.run(&inputs)?;
    println!("first step  {}", milliseconds(lap()));
    if options.rounds {
        for (round, line) in std::io::stdin().lines().enumerate() {
            line?;
            println!("round {:<5} {}", round + 1, steps(&executable, &inputs, &mut outputs, options.repeat)?);
        }
    } else if options.repeat > 0 {
        println!("per step    {}", steps(&executable, &inputs, &mut outputs, options.repeat)?);
    }

    for (index, output) in outputs.iter().enumerate() {
        let (kind, dimensions, data) = output.download()?;
        println!("output {index}    {dimensions:?}");
        if let Some(folder) = &options.out {
            std::fs::create_dir_all(folder)?;
            Array { kind, dimensions, data }.write(&folder.join(format!("output_{index}.npy")))?;
        }
    }
    Ok(())
}

/// Registers every target's plain symbol in a shared library, and nothing else of it.
fn register_symbols(path: &Path, api: Api, platform: Platform) -> Result<usize> {
    // SAFETY: the library only sets itself up when it is loaded; it is never unloaded.
    let library = ManuallyDrop::new(unsafe { Library::new(path)? });
    let targets = &oeq_native::registry::table()?.entries;
    for target in targets {
        // SAFETY: the library's symbol of this name is a handler.
        let execute = unsafe { *library.get::<ffi::Handler>(target.c_name.as_bytes_with_nul())? };
        let bundle = ffi::HandlerBundle { instantiate: None, prepare: None, initialize: None, execute: Some(execute) };
        api.register_handler(target.descriptor.name, platform.name(), bundle, 0)?;
    }
    Ok(targets.len())
}

/// Runs `count` steps and says what they took, after some that are not timed: caches and clocks have to wake up.
fn steps(executable: &Executable, inputs: &Inputs, outputs: &mut Vec<Buffer>, count: usize) -> Result<String> {
    let mut times = Vec::with_capacity(count);
    let mut last = Instant::now();
    for step in 0..count / 10 + count {
        // The outputs go before the next ones are made: XLA then finds the same memory again, and what it has recorded
        // in command buffers for these addresses stays good.
        outputs.clear();
        *outputs = executable.run(inputs)?;
        let now = Instant::now();
        if step >= count / 10 {
            times.push(now - last);
        }
        last = now;
    }
    times.sort_unstable();
    let at = |tenths: usize| times.get(tenths * times.len().saturating_sub(1) / 10).copied().unwrap_or_default();
    let [least, tenth, median, nine] = [0, 1, 5, 9].map(|tenths| milliseconds(at(tenths)));
    Ok(format!("{median} median, {least} least, {tenth} tenth, {nine} nine tenths of {count} steps"))
}

fn milliseconds(time: Duration) -> String {
    format!("{:.3} ms", time.as_secs_f64() * 1e3)
}

/// What the host needs of a model file.
struct Model<'a> {
    /// `StableHLO` as text or bytecode.
    code: &'a [u8],
    /// The platforms that it was exported for.
    platforms: Vec<String>,
    /// The arguments that the module has; `None` for all.
    kept: Option<Vec<usize>>,
}

impl<'a> Model<'a> {
    fn of(file: &'a [u8]) -> Result<Self> {
        // Bytecode begins with MLïR; text is text. What jax.export writes is a flatbuffer around bytecode.
        if file.starts_with(b"ML\xefR") || std::str::from_utf8(file).is_ok() {
            return Ok(Self { code: file, platforms: Vec::new(), kept: None });
        }
        Self::exported(file).ok_or_else(|| "the model is neither StableHLO nor an artifact of jax.export".into())
    }

    /// Reads the three fields of the artifact's table that matter here.
    fn exported(file: &'a [u8]) -> Option<Self> {
        let u16_at = |at: usize| Some(usize::from(u16::from_le_bytes(*file.get(at..)?.first_chunk()?)));
        let u32_at = |at: usize| usize::try_from(u32::from_le_bytes(*file.get(at..)?.first_chunk()?)).ok();
        let table = u32_at(0)?;
        // The distance back to the vtable is signed.
        let back = i32::from_le_bytes(*file.get(table..)?.first_chunk()?);
        let vtable = table.checked_add_signed(isize::try_from(back).ok()?.checked_neg()?)?;
        // Field number n has its offset in the table at vtable + 4 + 2n; what it points to is a length and the
        // elements.
        let vector = |number: usize| {
            let slot = 4 + 2 * number;
            let offset = if slot < u16_at(vtable)? { u16_at(vtable + slot)? } else { 0 };
            let start = table + offset;
            (offset != 0).then_some(start + u32_at(start)?)
        };
        let bytes = |at: usize| file.get(at + 4..)?.get(..u32_at(at)?);
        let platforms = vector(9)?;
        let platforms = (0..u32_at(platforms)?).map(|index| {
            let reference = platforms + 4 + 4 * index;
            Some(String::from_utf8_lossy(bytes(reference + u32_at(reference)?)?).into_owned())
        });
        let kept = vector(15).map_or(Some(Vec::new()), |at| (0..u32_at(at)?).map(|i| u16_at(at + 4 + 2 * i)).collect());
        let code = bytes(vector(13)?)?;
        code.starts_with(b"ML\xefR").then_some(Self {
            code,
            platforms: platforms.collect::<Option<_>>()?,
            kept: Some(kept?),
        })
    }
}
