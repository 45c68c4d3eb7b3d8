"""Cold and warm starts on one GPU: units, store and bundles, beside OpenEquivariance's own extension.

usage: cold.py [CASE ...]      CASE: 12energy 12forces 24forces warm bundle processes   (default: all)
Every run is a process of its own (coldstart.py), with NVRTC's disk cache off. The processes of a case get ready together,
and then compile one at a time. Seconds are those to the first result, less XLA's own compile time; that is taken from runs
that find everything in the store. The floor is what `oeq compile` takes for the units of the exported model: the same
units on the same cores with nothing else to do.
env: as in run.sh: OEQ_NATIVE_LIBRARY, OEQ_NATIVE_PYTHON, OEQ_PACKAGE, OEQ_UPSTREAM, OEQ_SITE, PYTHON; OEQ_TOOL (the program
oeq), REPEAT (2), LIMIT (seconds for each process, 200), WHOLE (on; off leaves out the whole programs in a pool of 8)
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

here = os.path.dirname(os.path.abspath(__file__))
root = os.path.dirname(os.path.dirname(here))
carry = os.path.join(root, ".carry")
env = os.environ
library = env.get("OEQ_NATIVE_LIBRARY", os.path.join(carry, "liboeq_native.so"))
native = env.get("OEQ_NATIVE_PYTHON", os.path.join(root, "ffi-headers/python"))
package = env.get("OEQ_PACKAGE", os.path.join(carry, "package"))
upstream = env.get("OEQ_UPSTREAM", os.path.join(carry, "upstream"))
site = env.get("OEQ_SITE", os.path.join(carry, "site"))
python = env.get("PYTHON", sys.executable)
tool = env.get("OEQ_TOOL", os.path.join(carry, "oeq"))
repeat, limit = int(env.get("REPEAT", 2)), float(env.get("LIMIT", 200))
with_whole = env.get("WHOLE", "on") != "off"
work = tempfile.mkdtemp(prefix="oeq-cold-")
bad, facts = [], {}


class Run:
    """A process that is getting ready, and compiles when it is told to."""

    count = 0

    def __init__(self, module, count, mode, **more):
        Run.count += 1
        self.what = f"{module} {count} {mode} {more}"
        self.gate = os.path.join(work, f"gate{Run.count}")
        path = ":".join([native if module == "ours" else upstream, package, here, site])
        variables = {k: v for k, v in env.items() if not k.startswith("OEQ_")}
        variables |= {"PYTHONPATH": path, "OEQ_NATIVE_LIBRARY": library, "OEQ_NOTORCH": "1", "CUDA_CACHE_DISABLE": "1",
                      "PYTHONDONTWRITEBYTECODE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "COLDSTART_GATE": self.gate}
        self.log = open(os.path.join(work, f"log{Run.count}"), "w+")
        self.process = subprocess.Popen([python, os.path.join(here, "coldstart.py"), str(count), mode], env=variables | more,
                                        stdout=self.log, stderr=subprocess.STDOUT)

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def ready(self):
        deadline = time.time() + limit
        while not os.path.exists(f"{self.gate}.{self.process.pid}"):
            if self.process.poll() is not None or time.time() > deadline:
                raise RuntimeError(f"{self.what} did not get ready: {self.text()[-2000:]}")
            time.sleep(0.02)

    def go(self):
        open(self.gate, "w").close()

    def result(self):
        status = self.process.wait(timeout=limit)
        lines = [line for line in self.text().splitlines() if line.startswith('{"module"')]
        if status or not lines:
            raise RuntimeError(f"{self.what}: exit {status}: {self.text()[-2000:]}")
        return json.loads(lines[-1])


def one_by_one(*groups):
    """Lets all get ready, then each compile by itself. Answers the results, group by group."""
    for run in sum(groups, []):
        run.ready()
    results = []
    for group in groups:
        results.append([])
        for run in group:
            run.go()
            results[-1].append(run.result())
    return results


def times(make, number=None):
    return [make() for _ in range(repeat if number is None else number)]


def median(runs, name):
    return statistics.median(run[name] for run in runs)


def store(name):
    return os.path.join(work, f"store-{name}")


def check(name, value, bound, at_least=True):
    good = value >= bound if at_least else value <= bound
    facts[name] = round(value, 3)
    if not good:
        bad.append(f"{name} is {value:.3f}, {'at least' if at_least else 'at most'} {bound} was expected")
    return f"{value:.2f} ({'>=' if at_least else '<='} {bound}: {'yes' if good else 'NO'})"


def floor(model, out):
    """Seconds that the units of a model take on all cores, and the sum of their times, by the tool alone."""
    if not os.path.exists(tool):
        return None
    command = [tool, "--json", "compile", model, "--arch", "sm_90", "--out", out]
    runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=limit,
                                      env=env | {"CUDA_CACHE_DISABLE": "1"}).stdout) for _ in range(repeat)]
    return min(runs, key=lambda run: run["wall_s"])


def ratio(count, mode, bound, whole):
    directory, model = store(f"{count}-{mode}"), os.path.join(work, f"{count}-{mode}.jaxexport")
    ours = lambda **more: Run("ours", count, mode, **more)
    filled, warm, cold, pool, theirs = one_by_one(
        [ours(OEQ_STORE_DIR=directory, COLDSTART_MODEL=model, COLDSTART_EXPORT=os.path.join(work, f"{count}-{mode}.exported.oeqb"))],
        times(lambda: ours(OEQ_STORE_DIR=directory)), times(ours),
        times(lambda: ours(OEQ_COMPILE_UNITS="whole", OEQ_COMPILE_THREADS="8"), None if with_whole else 0), [Run("upstream", count, mode)])
    xla = median(warm, "xla_compile_s")
    mine, up = median(cold, "cold_s"), theirs[0]["cold_s"]
    own = max(mine - xla, 1e-3)
    off = max(abs(run["check"] - theirs[0]["check"]) / abs(theirs[0]["check"]) for run in cold + warm)
    print(f"cold: {count} convolutions, {mode}: ours {mine:.2f} s, upstream {up:.2f} s; XLA alone {xla:.2f} s; beyond XLA {own:.2f}, "
          f"{up - xla:.2f} s; upstream/ours {check(f'{count} {mode} over upstream', (up - xla) / own, bound)}; "
          f"ours each {[run['cold_s'] for run in cold]}; results differ by {off:.1e}", flush=True)
    if pool:
        proto = median(pool, "cold_s")
        print(f"cold: {count} convolutions, {mode}: whole programs in a pool of 8 {proto:.2f} s, beyond XLA {proto - xla:.2f} s; whole/ours "
              f"{check(f'{count} {mode} over whole programs', (proto - xla) / own, whole)}", flush=True)
    least = floor(model, os.path.join(work, f"{count}-{mode}.oeqb"))
    if least:
        print(f"cold: {count} convolutions, {mode}: {least['units']} units, by the tool alone {least['wall_s']:.2f} s on {cold[0]['cores']} cores, "
              f"their times add up to {least['sum_s']:.2f} s; ours from XLA's start to the first result {mine:.2f} s, over the floor "
              f"{mine / least['wall_s']:.2f}; beyond XLA {check(f'{count} {mode} over the floor', own / least['wall_s'], 1.15, False)}", flush=True)
    if off > 1e-4:
        bad.append(f"{count} {mode}: results differ by {off:.1e}")
    facts[f"{count} {mode} compiled"] = filled[0]["stats"]["compiled"]


def warm_store():
    directory = store("24-forces")
    if not os.path.exists(directory):
        one_by_one([Run("ours", 24, "forces", OEQ_STORE_DIR=directory)])
    (runs,) = one_by_one(times(lambda: Run("ours", 24, "forces", OEQ_STORE_DIR=directory), 3))
    xla, cold = median(runs, "xla_compile_s"), median(runs, "cold_s")
    print(f"cold: 24 convolutions, forces, from the store in a fresh process: {cold:.3f} s, XLA alone {xla:.3f} s, beyond it "
          f"{check('from the store beyond XLA', cold - xla, 0.1, False)}; NVRTC that came into /proc/self/maps: {runs[0]['nvrtc_opened'] or 'none'}; {runs[0]['stats']}", flush=True)
    if runs[0]["nvrtc_opened"] or runs[0]["stats"]["compiled"]:
        bad.append(f"from the store: NVRTC {runs[0]['nvrtc_opened']}, {runs[0]['stats']['compiled']} compiled")


def bundle():
    made = [path for path in (os.path.join(work, f"24-forces{kind}.oeqb") for kind in ("", ".exported")) if os.path.exists(path)]
    if not made:
        made = [os.path.join(work, "k.exported.oeqb")]
        one_by_one([Run("ours", 24, "forces", COLDSTART_EXPORT=made[0])])
    groups = [times(lambda: Run("ours", 24, "forces", OEQ_BUNDLE=path, OEQ_NVRTC="/nonesuch", OEQ_STORE="off"), 3) for path in made]
    for path, runs in zip(made, one_by_one(*groups)):
        xla, cold = median(runs, "xla_compile_s"), median(runs, "cold_s")
        by = "exported by a run" if "exported" in path else "made by oeq compile"
        print(f"cold: 24 convolutions, forces, from a bundle {by}, {os.path.getsize(path)} bytes, with OEQ_NVRTC=/nonesuch and no store: {cold:.3f} s, "
              f"XLA alone {xla:.3f} s, beyond it {check(f'bundle {by} beyond XLA', cold - xla, 0.1, False)}; NVRTC that came into /proc/self/maps: "
              f"{runs[0]['nvrtc_opened'] or 'none'}; {runs[0]['stats']}", flush=True)
        if runs[0]["nvrtc_opened"] or runs[0]["stats"]["compiled"]:
            bad.append(f"from a bundle: {runs[0]}")


def together(runs):
    for run in runs:
        run.ready()
    for run in runs:
        run.go()
    return [run.result() for run in runs]


def processes():
    (alone,) = one_by_one([Run("ours", 12, "forces", OEQ_STORE_DIR=store(f"alone{i}")) for i in range(repeat)])
    one, units = median(alone, "cold_s"), alone[0]["stats"]["compiled"]
    sums, walls, waits = [], [], []
    for i in range(repeat + 1):  # The last time everything is in the store: what eight XLAs take on these cores.
        runs = together(times(lambda: Run("ours", 12, "forces", OEQ_STORE_DIR=store(f"eight{min(i, repeat - 1)}")), 8))
        sums.append(sum(run["stats"]["compiled"] for run in runs))
        waits.append(sum(run["stats"]["store_waits"] for run in runs))
        walls.append(max(run["cold_s"] for run in runs))
    wall = statistics.median(walls[:-1])
    print(f"cold: 12 convolutions, forces, 8 processes at once: {sums[:-1]} compilations in all, one process alone {units}; {waits[:-1]} waits; "
          f"the slowest {[round(w, 2) for w in walls[:-1]]} s, one process {one:.2f} s: {check('8 processes over one', wall / one, 1.3, False)}; "
          f"8 at once with everything in the store {walls[-1]:.2f} s, {sums[-1]} compilations", flush=True)
    if any(total != units for total in sums[:-1]) or sums[-1]:
        bad.append(f"8 processes: {sums} compilations, one process {units}")


cases = {"12energy": lambda: ratio(12, "energy", 15, 3), "12forces": lambda: ratio(12, "forces", 9, 1.7),
         "24forces": lambda: ratio(24, "forces", 10, 1.7), "warm": warm_store, "bundle": bundle, "processes": processes}
begin = time.time()
try:
    for name in sys.argv[1:] or cases:
        try:
            cases[name]()
        except Exception as error:  # The other cases are worth having.
            bad.append(f"{name}: {error}")
            print(f"cold: {name}: {error}", flush=True)
        print(f"cold: {name} done at {time.time() - begin:.0f} s", flush=True)
finally:
    shutil.rmtree(work, ignore_errors=True)
print(f"RESULT cold {json.dumps(facts)} {'; '.join(bad) or 'everything as expected'}")
sys.exit(bool(bad))
