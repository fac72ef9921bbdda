"""Disturb runs of every mode, at random moments, again and again; each must go on with --resume as if nothing was.

    python tests/faults/kills.py --kills 1000 --seed 3 --jobs 2 --results kills.jsonl

A chain (chains.py) is one run directory: start, disturb, resume, disturb, ... and at its end a resume that trains to
the end, after which the invariants are checked. Everything random in a chain follows from --seed and its number. With
--results, each finished chain is added to a file, and the same command goes on behind the chains that the file holds.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from chains import FAULTS, Chain, Kill, faults_of, small_disk
from harness import MODES, Faulty, Mode

from rl_cluster_benchmark.cli.values import positive
from rl_cluster_benchmark.core.stop import ORDERS

LENGTH = 6  # faults of a chain, before its end
EARLY = 0.25  # share of the faults that come while the run starts


def plan(
    count: int, modes: list[Mode], faults: Collection[str], generator: random.Random
) -> list[tuple[Mode, list[Kill]]]:
    """Chains over the modes in turn; within a mode every fault comes in turn, in random order."""
    bags: dict[Mode, list[str]] = {mode: [] for mode in modes}
    known = {mode: [fault for fault in faults_of(mode) if fault in faults] for mode in modes}
    chains = []
    while count > 0:
        for mode in modes:
            length = min(LENGTH, count)
            kills = []
            for _ in range(length):
                if not bags[mode]:
                    bags[mode] = generator.sample(known[mode], len(known[mode]))
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
    parser.add_argument("--faults", nargs="+", choices=FAULTS, metavar="FAULT", help=f"default: {', '.join(FAULTS)}")
    parser.add_argument("--stopped", type=float, default=30.0, metavar="S", help="seconds of SIGSTOP; default: 30")
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="chains at the same time; default: 1")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add a line for each fault, and go on from there")
    args = parser.parse_args()
    for number in ORDERS:  # under nohup, or in the background: ignored here as before, but not by the runs
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**32)
    faults = args.faults or list(FAULTS)
    modes = [mode for mode in MODES if args.modes is None or mode.name in args.modes]
    modes = [mode for mode in modes if not set(faults).isdisjoint(faults_of(mode))]
    print(f"{args.kills} kills, --seed {seed}", flush=True)
    results, failures = strike(
        args.kills, seed, modes, args.stopped, faults, file=args.results, go_on=True, jobs=args.jobs
    )
    if args.results:
        results = recorded(args.results)
    print(table(results))
    if failures:
        print(f"{failures} chains of kills FAILED; see above. The {len(results)} in the table were recovered.")
        return 1
    print(f"{len(results)} kills: every one recovered by --resume, no invariant broken, nothing left behind.")
    return 0


def recorded(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def strike(
    count: int, seed: int, modes: list[Mode], stopped: float, faults: Collection[str] = tuple(FAULTS), *,
    file: Path | None = None, go_on: bool = False, jobs: int = 1,
) -> tuple[list[dict[str, Any]], int]:  # fmt: skip
    """(kills that were recovered, chains that were not); without `go_on` the first of those ends it."""

    def run(number: int, mode: Mode, kills: list[Kill]) -> list[dict[str, Any]] | str:
        with tempfile.TemporaryDirectory(prefix="rlcb-kills-") as folder:
            try:
                generator = random.Random(f"{seed}/{number}")
                with small_disk(Path(folder)) as disk:
                    return Chain(mode, disk / "run", Path(folder), generator, stopped).run(kills)
            except Exception:
                if not go_on:
                    raise
                return traceback.format_exc()

    results: list[dict[str, Any]] = []
    failures = 0
    done_before = (
        {result["chain"] for result in recorded(file) if result["seed"] == seed} if file is not None else set()
    )
    chains = {n: each for n, each in enumerate(plan(count, modes, faults, random.Random(seed))) if n not in done_before}
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, number, *each): number for number, each in chains.items()}
        try:
            for future in as_completed(running):
                number, done = running[future], future.result()
                mode, kills = chains[number]
                if isinstance(done, str):
                    print(f"FAILED  {mode.name}, {kills}:\n{done}", flush=True)
                    failures += 1
                    continue
                results += done
                if file is not None:
                    with open(file, "a") as opened:
                        opened.writelines(
                            json.dumps(result | {"seed": seed, "chain": number}) + "\n" for result in done
                        )
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
