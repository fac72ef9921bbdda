"""Kill runs of every mode, at random moments, again and again; every one must go on with --resume as if nothing was.

    python tests/faults/kills.py --kills 300 --seed 1 --results kills.jsonl

A chain is one run directory: start, kill, resume, kill, ... and at its end a resume that trains to the end, after which
the invariants are checked. Everything random in a chain follows from --seed and its number. With --results, kills are
added to a file, and the table is of all that are in it.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import invariants
import psutil
from harness import MODES, Faulty, Mode

from rl_cluster_benchmark.cli_arguments import positive

CHAIN = 6  # kills, then the end
GRACE = 20.0  # seconds from SIGTERM to the end
EARLY = 0.25  # share of the kills that come while the run starts


@dataclass(frozen=True)
class Kill:
    fault: str
    early: bool
    delay: float


FAULTS = {
    "main": "SIGKILL of the main process (of a node)",
    "group": "SIGKILL of the whole group",
    "worker": "SIGKILL of a worker (A3C, PPO, A2C) or actor",
    "learner": "SIGKILL of a learner",
    "server": "SIGKILL of the process that workers are forked from",
    "launcher": "SIGKILL of the launcher",
    "term": "SIGTERM, 20 s grace",
    "stop": "SIGSTOP of a worker, then SIGCONT",
}


def faults_of(mode: Mode) -> list[str]:
    if mode.mode == "sequential":
        return ["main", "group", "term"]
    learner = ["learner"] if mode.algorithm == "impala" else []
    launcher = ["launcher"] if mode.mode == "distributed" else []
    return ["main", "group", "worker", *learner, "server", *launcher, "term", "stop"]


def chain(
    mode: Mode, kills: list[Kill], folder: Path, generator: random.Random, stopped: float
) -> list[dict[str, Any]]:
    output = folder / "run"
    history: dict[str, Any] = {}
    results = []
    for kill in kills:
        began = time.monotonic()
        with Faulty(mode, output) as run:
            done = _strike(run, kill, generator, stopped)
            left = run.leftovers()
            assert not left, f"{kill} left behind: {left}\n{run.text}"
            assert "Traceback" not in run.text, run.text
        invariants.check_torn(output, mode)
        invariants.check_newest(output, history)
        seconds = round(time.monotonic() - began, 2)
        results.append({"mode": mode.name, "early": kill.early, "seconds": seconds} | done)
    steps = invariants.check_newest(output, history)
    with Faulty(mode, output, timesteps=steps + 3000) as run:
        status = run.wait(120)
        assert status == 0, f"--resume after {kills} ended with {status}:\n{run.text}"
        left = run.leftovers()
        assert not left, f"a good end left behind: {left}"
    invariants.check(output, mode, starts=len(kills) + 1, history=history)
    return results


def _strike(run: Faulty, kill: Kill, generator: random.Random, stopped: float) -> dict[str, Any]:
    """Do it, or, when there is no such process yet, kill the main process: (what was done, how the run ended)."""
    if kill.early:
        time.sleep(3 * kill.delay)
    else:
        run.wait_for_updates()  # the proof that it goes on after the kill before
        time.sleep(kill.delay)
    if run.process.poll() is not None:
        raise AssertionError(f"it ended by itself with {run.process.returncode}:\n{run.text}")
    victims = _victims(run, kill.fault)
    if not victims:  # too early: it has none yet
        victims, kill = [psutil.Process(run.process.pid)], Kill("main", True, 0.0)
    status = _end(run, kill, generator.choice(victims), stopped)
    return {"fault": kill.fault, "status": status}


def _end(run: Faulty, kill: Kill, victim: psutil.Process, stopped: float) -> int:
    """Compares how the run ends with how it should."""
    if kill.fault == "group":
        run.signal_group(signal.SIGKILL)
        return run.wait(30)
    if kill.fault == "term":
        run.process.send_signal(signal.SIGTERM)
        status = run.wait(GRACE)
        expected = (128 + signal.SIGTERM, -signal.SIGTERM) if kill.early else (128 + signal.SIGTERM,)
        assert status in expected, f"SIGTERM: status {status}:\n{run.text}"
        return status
    if kill.fault == "stop":
        victim.send_signal(signal.SIGSTOP)
        time.sleep(stopped)
        victim.send_signal(signal.SIGCONT)
        run.wait_for_updates()
        return _end_well(run)
    if kill.fault == "server":
        victim.suspend()  # it forks nobody between the next two lines
    is_replaced = kill.fault == "server" and not victim.children()
    victim.kill()
    if is_replaced:
        try:
            run.wait_for_updates()
        except AssertionError:
            if "could not be started" not in run.text:  # it was asked for a worker just then
                raise
        else:
            return _end_well(run)
    if kill.fault == "worker" and run.mode.algorithm == "impala" and not kill.early:
        run.wait_for_text("Another takes its place")
        run.wait_for_updates()
        return _end_well(run)
    status = run.wait(90)
    expected = [-signal.SIGKILL] if victim.pid == run.process.pid else [1]
    if run.mode.mode == "distributed":
        expected.append(128 + signal.SIGKILL)  # a launcher's is the worst of its nodes'
    assert status in expected, f"status {status}:\n{run.text}"
    if victim.pid != run.process.pid:
        assert "error: " in run.text, run.text
    return status


def _victims(run: Faulty, fault: str) -> list[psutil.Process]:
    own = psutil.Process(run.process.pid)
    if fault in ("group", "term", "launcher"):
        return [own]
    if fault == "main":
        return run.mains()
    if fault == "server":
        return run.servers()
    first = 1 if run.mode.algorithm == "impala" and fault != "learner" else 0
    last = 1 if fault == "learner" else None
    return [worker for workers in run.workers() for worker in workers[first:last]]


def _end_well(run: Faulty) -> int:
    run.process.send_signal(signal.SIGTERM)
    status = run.wait(GRACE)
    assert status == 128 + signal.SIGTERM, run.text
    return status


def plan(count: int, modes: list[Mode], generator: random.Random) -> list[tuple[Mode, list[Kill]]]:
    """Chains over the modes in turn; within a mode every fault comes in turn, in random order."""
    bags: dict[Mode, list[str]] = {mode: [] for mode in modes}
    chains = []
    while count > 0:
        for mode in modes:
            length = min(CHAIN, count)
            kills = []
            for _ in range(length):
                if not bags[mode]:
                    bags[mode] = generator.sample(faults_of(mode), len(faults_of(mode)))
                early = generator.random() < EARLY
                kills.append(Kill(bags[mode].pop(), early, generator.random()))
            count -= length
            if kills:
                chains.append((mode, kills))
    return chains


def table(results: list[dict[str, Any]]) -> str:
    """Faults by modes, in Markdown."""
    counts = collections.Counter((result["fault"], result["mode"]) for result in results)
    modes = [mode.name for mode in MODES]
    lines = ["| fault | " + " | ".join(modes) + " | all |", "|-|" + "-|" * (len(modes) + 1)]
    for fault, text in FAULTS.items():
        row = [counts[fault, mode] for mode in modes]
        lines.append(f"| {text} | " + " | ".join(str(n or "") for n in row) + f" | {sum(row)} |")
    totals = [sum(counts[fault, mode] for fault in FAULTS) for mode in modes]
    return "\n".join([*lines, "| all | " + " | ".join(map(str, totals)) + f" | {sum(totals)} |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=positive, default=300, metavar="N", help="how many; default: 300")
    parser.add_argument("--seed", type=int, metavar="N", help="of the faults, victims and moments; default: a new one")
    names = [mode.name for mode in MODES]
    parser.add_argument("--modes", nargs="+", choices=names, metavar="MODE", help=f"default: {', '.join(names)}")
    parser.add_argument("--stopped", type=float, default=30.0, metavar="S", help="seconds of SIGSTOP; default: 30")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="chains at the same time; default: 1")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add a line for each kill")
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**32)
    modes = [mode for mode in MODES if args.modes is None or mode.name in args.modes]
    print(f"{args.kills} kills, --seed {seed}", flush=True)
    results, failures = strike(args.kills, seed, modes, args.stopped, args.results, go_on=True, jobs=args.jobs)
    if args.results:
        results = [json.loads(line) for line in args.results.read_text().splitlines()]
    print(table(results))
    if failures:
        print(f"{failures} chains of kills FAILED; see above. The {len(results)} in the table were recovered.")
        return 1
    print(f"{len(results)} kills: every one recovered by --resume, no invariant broken, nothing left behind.")
    return 0


def strike(
    count: int, seed: int, modes: list[Mode], stopped: float, file: Path | None = None, go_on: bool = False,
    jobs: int = 1,
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """(kills that were recovered, chains that were not); without `go_on` the first of those ends it."""

    def run(number: int, mode: Mode, kills: list[Kill]) -> list[dict[str, Any]] | str:
        with tempfile.TemporaryDirectory(prefix="rlcb-kills-") as folder:
            try:
                return chain(mode, kills, Path(folder), random.Random(f"{seed}/{number}"), stopped)
            except Exception:
                if not go_on:
                    raise
                return traceback.format_exc()

    results: list[dict[str, Any]] = []
    failures = 0
    chains = plan(count, modes, random.Random(seed))
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, number, *each): each for number, each in enumerate(chains)}
        try:
            for future in as_completed(running):
                (mode, kills), done = running[future], future.result()
                if isinstance(done, str):
                    print(f"FAILED  {mode.name}, {kills}:\n{done}", flush=True)
                    failures += 1
                    continue
                results += done
                if file is not None:
                    with open(file, "a") as opened:
                        opened.writelines(json.dumps(result | {"seed": seed}) + "\n" for result in done)
                names = ", ".join(result["fault"] for result in done)
                print(f"{len(results):4d} of {count}  {mode.name}: {names}", flush=True)
        except BaseException:  # Ctrl-C, or a failure: whatever runs ends now, and its chain with it
            pool.shutdown(wait=False, cancel_futures=True)
            for faulty in list(Faulty.live):
                faulty.kill()
            raise
    return results, failures


if __name__ == "__main__":
    sys.exit(main())
