"""A pytest plugin (-p suite) that runs OpenEquivariance's own JAX tests where nothing can be downloaded and time is short.

- The convolution tests fetch a molecule's graph from the network; a seeded random graph takes its place. It is undirected,
  as a molecule's is: deterministic convolutions rely on that.
- The tests' PyTorch classes are absent here (OEQ_NOTORCH=1); where a test names one without asking for JAX first, it
  gets the JAX class.
- SUITE_SAMPLES problems (8) are drawn from each class of single-irrep problems; of the rest, the production models and
  shared weights are kept, with SUITE_EXTRA=1 the other memory layout too.
- SUITE_SHARD=I/N keeps every N-th group of tests that share a kernel, so N processes share the work.
- SUITE_FILE gets one JSON line per finished test, so that counts survive a time limit.

`suite.py compare OURS.jsonl UPSTREAM.jsonl` prints the counts of two modules side by side.
"""

import itertools
import json
import os
import random
import sys
import time

SAMPLED = ("TestUVUSingleIrrep", "TestUVWSingleIrrep")
KEPT = SAMPLED + ("TestProductionModels", "TestSharedWeights", "TestAtomicSharedWeights")
EXTRA = ("TestIrMul", "TestIrMulLayout")


def _prepare():
    import urllib.request

    import numpy as np

    import frames
    import openequivariance as oeq

    for name in ("TensorProduct", "TensorProductConv"):
        if not hasattr(oeq, name):
            setattr(oeq, name, getattr(oeq.jax, name))
    import openequivariance.benchmark.ConvBenchmarkSuite as bench
    from openequivariance.core.ConvolutionBase import CoordGraph

    def load_graph(_path):
        rng = np.random.default_rng(7)
        graph = frames.random_graph(rng, 300, 4000)
        return CoordGraph(rng.standard_normal((300, 3)), graph["rows"], graph["cols"], "random")

    urllib.request.urlretrieve = lambda *_args, **_keywords: None
    bench.load_graph = load_graph


def _group(item):
    spec = getattr(item, "callspec", None)
    return item.path.name, item.cls.__name__ if item.cls else "", spec.id if spec else ""


def pytest_configure(config):
    _prepare()


def _choose(items):
    """The items to run, one group of tests after the other."""
    groups = {}
    classes = KEPT + (EXTRA if os.environ.get("SUITE_EXTRA") == "1" else ())
    for item in items:
        file, cls, _ = _group(item)
        if "triple" not in item.name and (cls in classes or file == "vmap_test.py"):
            groups.setdefault(_group(item), []).append(item)
    kept = {k: v for k, v in groups.items() if k[1] not in SAMPLED}
    size = int(os.environ.get("SUITE_SAMPLES", 8))
    for file in sorted({k[0] for k in groups}):
        variants = ("atomic", "deterministic", "kahan") if file.startswith("conv") else ("",)
        for cls, dtype, variant in itertools.product(SAMPLED, ("F32", "F64"), variants):
            pool = sorted(k for k in groups if k[:2] == (file, cls) and dtype in k[2] and variant in k[2])
            drawn = random.Random(f"{file} {cls} {dtype} {variant}").sample(pool, min(len(pool), -(-size // len(variants))))
            kept.update((k, groups[k]) for k in drawn)
    kept = {k: v for k, v in kept.items() if not ("F64" in k[2] and "kahan" in k[2])}  # those skip themselves
    order = sorted(kept)
    random.Random(1).shuffle(order)  # should time run out, every kind has had its turn
    index, count = map(int, os.environ.get("SUITE_SHARD", "0/1").split("/"))
    return [item for i, key in enumerate(order) if i % count == index for item in kept[key]]


class _Last:
    """After every other plugin: pytest orders tests by their fixtures first."""

    def pytest_collection_modifyitems(self, items, config):
        chosen = _choose(items)
        config.hook.pytest_deselected(items=[i for i in items if i not in set(chosen)])
        items[:] = chosen

    pytest_collection_modifyitems.pytest_impl = {"trylast": True}


def pytest_sessionstart(session):
    session.config.pluginmanager.register(_Last(), "suite-last")


def pytest_runtest_logreport(report):
    if "SUITE_FILE" not in os.environ or not (report.when == "call" or (report.when == "setup" and not report.passed)):
        return
    text = "" if report.passed else str(report.longrepr)[-600:]
    with open(os.environ["SUITE_FILE"], "a") as out:
        out.write(json.dumps({"test": report.nodeid.split("/")[-1], "outcome": "error" if report.when == "setup" and report.failed else report.outcome,
                              "seconds": round(report.duration, 2), "at": round(time.time(), 1), "text": text}) + "\n")


def _kind(test):
    file, _, rest = test.partition("::")
    cls = rest.partition("::")[0] if "::" in rest else "vmap"
    variant = next((v for v in ("atomic", "deterministic", "kahan") if v in rest), "")
    return " ".join(filter(None, (file.replace("_test.py", ""), cls.replace("Test", ""), variant)))


def compare(ours_path, upstream_path):
    sides = {}
    for side, path in (("ours", ours_path), ("upstream", upstream_path)):
        sides[side] = {}
        if os.path.exists(path):
            for line in open(path):
                run = json.loads(line)
                sides[side][run["test"]] = run
    count = lambda side, kind, outcome: sum(1 for t, r in sides[side].items() if _kind(t) == kind and r["outcome"] == outcome)
    kinds = sorted({_kind(t) for s in sides.values() for t in s})
    print(f"suite: {'':42s} {'ours':>28s} {'upstream':>28s}\nsuite: {'':42s} {'passed failed error skipped':>28s} {'passed failed error skipped':>28s}")
    for kind in kinds:
        cells = [" ".join(f"{count(side, kind, o):6d}" for o in ("passed", "failed", "error", "skipped")) for side in ("ours", "upstream")]
        print(f"suite: {kind:42s} {cells[0]:>28s} {cells[1]:>28s}")
    totals = {s: {o: sum(r["outcome"] == o for r in runs.values()) for o in ("passed", "failed", "error", "skipped")} for s, runs in sides.items()}
    ours, theirs = sides["ours"], sides["upstream"]
    bad = lambda run: run["outcome"] in ("failed", "error")
    worse = [t for t, r in ours.items() if bad(r) and not (t in theirs and bad(theirs[t]))]
    both = [t for t, r in ours.items() if bad(r) and t in theirs and bad(theirs[t])]
    for t in worse[:8]:
        print(f"suite: FAILED on ours only: {t}: {ours[t]['text']}")
    for t in both[:4]:
        print(f"suite: failed on both: {t}: {ours[t]['text'][-200:]}")
    missing = sorted(set(theirs) - set(ours)) + sorted(set(ours) - set(theirs))
    seconds = {s: round(sum(r["seconds"] for r in runs.values())) for s, runs in sides.items()}
    ok = ours and not worse
    short = {s: f"{n['passed']} passed {n['failed'] + n['error']} failed {n['skipped']} skipped" for s, n in totals.items()}
    print(f"RESULT suite {'ok' if ok else 'FAILED'}: ours {short['ours']}; upstream {short['upstream']}; failed on ours only {len(worse)}, on both {len(both)}; "
          f"finished on one side only {len(missing)}; seconds in tests {seconds}")
    return not ok


if __name__ == "__main__":
    sys.exit(compare(*sys.argv[2:4]))
