"""Lets programs take turns on one device, and compares their times per step.

usage: turns.py [--rounds N] [--limit SECONDS] [--logs FOLDER] [--judge] --host NAME COMMAND ...
                [--host|--beside NAME COMMAND ...] ...

Every program is started once, after the one before it is ready: it prints a line that begins with "first step", then,
for each line on its standard input, runs a round of steps and prints a line "round K 1.2 ms median, 1.1 ms least, 1.1
ms tenth, 1.4 ms nine tenths of 200 steps". So only one runs at a time, and whatever else happens on the machine meets
all of them. A first round of each is not counted, and the order changes from round to round.

A table is printed, whose ratios are to the first program. With --judge the median of a --host's medians may not be
above the first program's by more than the noise: the difference between the largest and the smallest median of the
first program's own rounds, but at least 1 %. A --beside is only told.
"""

import argparse
import pathlib
import queue
import re
import statistics
import subprocess
import sys
import threading
import time

NOISE = 0.01
FIELDS = ("median", "least", "tenth", "nine tenths")


def take(began, step, count):
    """A program's side: its first step began then; `step`, which waits for its end, runs `count` times and a few before."""
    print(f"first step  {1e3 * (time.perf_counter() - began):.3f} ms", flush=True)
    for index, _ in enumerate(sys.stdin, 1):
        times, last = [], time.perf_counter()
        for number in range(count // 10 + count):
            step()
            now = time.perf_counter()
            if number >= count // 10:
                times.append(now - last)
            last = now
        times.sort()
        least, tenth, median, nine = (f"{1e3 * times[tenths * (count - 1) // 10]:.3f} ms" for tenths in (0, 1, 5, 9))
        print(f"round {index:<5} {median} median, {least} least, {tenth} tenth, {nine} nine tenths of {count} steps")
        sys.stdout.flush()


class Host:
    """A program that runs rounds of steps when it is told to."""

    def __init__(self, name, command, judged, logs, limit):
        self.name, self.judged, self.deadline = name, judged, limit
        self.rounds, self.failure, self.said = [], None, []
        self.log = logs / (re.sub("[^a-zA-Z0-9]+", "_", name) + ".log")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("w"), text=True
        )
        self.lines = queue.Queue()
        threading.Thread(target=self.read, daemon=True).start()
        self.expect("first step")

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def expect(self, beginning):
        """The next line that begins so; none if the program failed."""
        while self.failure is None:
            try:
                line = self.lines.get(timeout=max(0.1, self.deadline - time.monotonic()))
            except queue.Empty:
                self.stop("took too long")
                break
            if line is None:
                self.stop(f"ended with status {self.process.wait()}")
                break
            self.said.append(line)
            if line.startswith(beginning):
                return line
        return None

    def stop(self, why):
        self.process.kill()
        self.process.wait()
        self.failure = why

    def round(self, counted):
        if self.failure is not None:
            return
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except OSError:
            pass  # The end of its output tells what became of it.
        line = self.expect("round ")
        if line is not None and counted:
            found = re.findall(r"([0-9.]+) ms ([a-z ]*[a-z])(?:,| of)", line)
            self.rounds.append({field: float(number) for number, field in found})

    def finish(self):
        """Lets the program write its outputs and end."""
        if self.failure is None:
            try:
                self.process.stdin.close()
            except OSError:
                pass
            # It ends in its own time, but within the limit.
            try:
                while (line := self.lines.get(timeout=max(0.1, self.deadline - time.monotonic()))) is not None:
                    self.said.append(line)
                status = self.process.wait()
                if status != 0:
                    self.failure = f"ended with status {status}"
            except queue.Empty:
                self.stop("took too long to end")
        with self.log.open("a") as log:
            log.write("\n".join(self.said) + "\n")

    def reason(self):
        """The last line of its log that tells of an error, else its last."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        lines = lines or ["it said nothing"]
        return ([line for line in lines if "error" in line.lower()] or lines)[-1][:300]

    def median(self):
        return statistics.median(r["median"] for r in self.rounds)

    def best(self):
        return min(r["median"] for r in self.rounds)

    def spread(self):
        medians = [r["median"] for r in self.rounds]
        return max(medians) - min(medians)


def table(hosts):
    first = hosts[0]
    print(f"  {'ms per step':<28} {'least':>8} {'tenth':>8} {'median':>8} {'nine tenths':>12}"
          f" {'medians of the rounds':>22} {'median':>8} {'best round':>11}")  # fmt: skip
    for host in hosts:
        if not host.rounds:
            print(f"  {host.name:<28} {host.failure}")
            continue
        of = {field: statistics.median(r[field] for r in host.rounds) for field in FIELDS}
        least = min(r["least"] for r in host.rounds)
        ratios = (f"{host.median() / first.median():>8.3f} {host.best() / first.best():>11.3f}") if first.rounds else ""
        medians = f"{host.best():.3f} to {host.best() + host.spread():.3f}"
        print(f"  {host.name:<28} {least:>8.3f} {of['tenth']:>8.3f} {of['median']:>8.3f} {of['nine tenths']:>12.3f}"
              f" {medians:>22} {ratios}")  # fmt: skip
    print(f"  (medians over {len(first.rounds)} rounds, least of all steps; "
          f"the last two columns are times those of {first.name})")  # fmt: skip


def judge(hosts):
    """The number of programs that are slower than the first."""
    first, slower = hosts[0], 0
    noise = max(first.spread() / first.median(), NOISE)
    for host in hosts[1:]:
        if not host.judged or host.failure is not None:
            continue
        ratio = host.median() / first.median()
        passed = ratio <= 1 + noise
        slower += not passed
        print(f"RESULT {'ok' if passed else 'FAILED'}: {host.name}: {ratio:.3f} times {first.name}'s time per step; "
              f"up to {1 + noise:.3f} is noise")  # fmt: skip
    return slower


def main(arguments):
    starts = [i for i, a in enumerate(arguments) if a in ("--host", "--beside")] + [len(arguments)]
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300)
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--judge", action="store_true")
    options = parser.parse_args(arguments[: starts[0]])
    if len(starts) < 2 or options.rounds < 1:
        parser.error("name at least one --host, and let it run a round")
    deadline = time.monotonic() + options.limit
    hosts = []
    try:
        for begin, end in zip(starts, starts[1:]):
            kind, name, *command = arguments[begin:end]
            hosts.append(Host(name, command, kind == "--host", options.logs, deadline))
        for number in range(options.rounds + 1):
            shift = number % len(hosts)
            for host in hosts[shift:] + hosts[:shift]:
                host.round(counted=number > 0)
        for host in hosts:
            host.finish()
    finally:
        for host in hosts:
            host.process.kill()
    table(hosts)
    failed = sum(host.failure is not None for host in hosts)
    for host in hosts:
        if host.failure is not None:
            print(f"RESULT FAILED: {host.name} {host.failure}: {host.reason()}")
    if options.judge and hosts[0].failure is None:
        failed += judge(hosts)
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
