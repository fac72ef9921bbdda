"""The same job in other libraries and in this project, one after the other on the same cores.

    make bench-peers                                           # everything: about an hour on 2 cores
    python bench/peers --only ours,sb3 --algorithm ppo         # some of it
    python bench/peers --n-steps 32 --seconds 15               # short rollouts: a first impression in minutes
    python bench/peers --score --seconds 1800                  # who plays better after the same time of training

Each library is installed from PyPI into a virtual environment of its own, once, outside this repository. One that
cannot be installed or that fails is reported with the reason; the others go on. peers.json, peers.md and peers.png are
written after every run, so Ctrl-C keeps what is finished.

On a machine without package index, carry Stable-Baselines3 there as a wheel: it is pure Python. CleanRL's setting needs
torch and EnvPool alone.

    pip install --no-deps --target carried stable-baselines3==2.9.2 cloudpickle    # here
    PYTHONPATH=carried python bench/peers --installed --only ours,sb3,cleanrl      # there
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import results
from environments import DEFAULT_FOLDER, python_of
from job import JOBS, Job
from measure import HERE, PeerFailedError, measure
from rl_cluster_benchmark.core.atomic_files import write_atomically
from rl_cluster_benchmark.machine import detection


@dataclass(frozen=True)
class Peer:
    title: str
    script: str
    algorithms: tuple[str, ...]
    options: tuple[str, ...] = ()
    is_ours: bool = False
    missing: str | None = None  # why it cannot be measured at all


PEERS = {
    "ours": Peer("this project", "train_ours.py", ("ppo", "a2c", "impala"), is_ours=True),
    "ours_float32": Peer(
        "this project, float32", "train_ours.py", ("ppo", "a2c", "impala"), ("--precision", "float32"), is_ours=True
    ),
    "sb3": Peer("Stable-Baselines3", "train_sb3.py", ("ppo", "a2c")),
    "cleanrl": Peer("CleanRL's setting", "train_cleanrl.py", ("ppo",)),
    "sample_factory": Peer("Sample Factory", "train_sample_factory.py", ("ppo", "impala")),
    "rllib": Peer("RLlib", "train_rllib.py", ("ppo", "impala")),
    "torchrl": Peer("torchrl", "train_torchrl.py", ("ppo", "a2c")),
    "torchbeast": Peer(
        "TorchBeast", "", ("impala",), missing="it is not on PyPI; its repository asks for a build of its own"
    ),
}


def main(argv: Sequence[str] | None = None, peers: dict[str, Peer] = PEERS) -> int:
    args = _arguments(argv, peers)
    output = Path(args.output_dir)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if args.score:
            import score

            return score.main(args, lambda name: _call(peers[name], name, args), output, _python_path(args))
        reports: list[dict[str, Any]] = []
        for algorithm in args.algorithm:
            reports.append(_new_report(JOBS[algorithm].with_steps(args.n_steps), peers, args))
            _measure_all(reports, peers, args, output)
    except KeyboardInterrupt:
        print("Interrupted; what was finished is kept.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"Saved {', '.join(str(file) for file in sorted(output.glob('peers.*')))}")
    return 0 if all(any("fps" in run for run in report["runs"]) for report in reports) else 1


def _interrupt(*_: object) -> None:
    """Ended like by Ctrl-C: the library that is running ends too."""
    raise KeyboardInterrupt


def _measure_all(reports: list[dict[str, Any]], peers: dict[str, Peer], args: argparse.Namespace, output: Path) -> None:
    """All rounds of the last report's job; the files hold all reports."""
    report = reports[-1]
    algorithm = report["job"]["algorithm"]
    for number in range(1, args.rounds + 1):
        for name in args.only:
            if name in report["left_out"] or algorithm not in peers[name].algorithms:
                continue
            print(f"{algorithm}, round {number}: {peers[name].title} ...", end=" ", flush=True)
            try:
                call = [*_call(peers[name], name, args), "--algorithm", algorithm]
                call += ["--n-steps", str(args.n_steps)] if args.n_steps else []
                log = output / "logs" / f"{algorithm}_{name}_{number}.txt"
                outcome = measure(call, log, seconds=args.seconds, python_path=_python_path(args))
                print(f"{outcome.fps:,.0f} env steps/s", flush=True)
            except PeerFailedError as error:
                outcome = str(error)  # type: ignore[assignment]
                print(f"failed: {error}", flush=True)
            report["runs"].append(results.record(name, number, outcome))
            _write(reports, output)
    _write(reports, output)
    print("\n" + results.markdown(report), flush=True)


def _call(peer: Peer, name: str, args: argparse.Namespace) -> list[str]:
    python = sys.executable if peer.is_ours or args.installed else python_of(name, Path(args.venvs).expanduser())
    return [python, str(HERE / peer.script), *peer.options]


def _python_path(args: argparse.Namespace) -> list[str]:
    """Where packages were carried to; a library's own environment needs nothing from there."""
    return os.environ.get("PYTHONPATH", "").split(os.pathsep) if args.installed else []


def _new_report(job: Job, peers: dict[str, Peer], args: argparse.Namespace) -> dict[str, Any]:
    machine = detection.detect()
    left_out = {}
    for name in args.only:
        if peers[name].missing is not None and job.algorithm in peers[name].algorithms:
            left_out[name] = peers[name].missing
    return {
        "job": asdict(job),
        "date": date.today().isoformat(),
        "machine": {"cpu": machine.cpu_model, "cores": machine.usable_cores},
        "seconds": args.seconds,
        "rounds": args.rounds,
        "titles": {name: peer.title for name, peer in peers.items()},
        "left_out": left_out,
        "runs": [],
    }


def _write(reports: list[dict[str, Any]], output: Path) -> None:
    write_atomically(output / "peers.json", (json.dumps(reports, indent=2) + "\n").encode())
    write_atomically(output / "peers.md", "\n".join(map(results.markdown, reports)).encode())
    with contextlib.suppress(ImportError):  # a machine without matplotlib has the figures
        write_atomically(output / "peers.png", results.draw(reports))


def _arguments(argv: Sequence[str] | None, peers: dict[str, Peer]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def names(allowed: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            for name in chosen:
                if name not in allowed:
                    raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
            return chosen

        return parse

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
        return int(text)

    parser.add_argument("--only", type=names(list(peers)), default=list(peers), metavar="A,B", help=", ".join(peers))
    parser.add_argument(
        "--algorithm", type=names(list(JOBS)), default=list(JOBS), metavar="A,B", help="default: ppo,a2c,impala"
    )
    parser.add_argument("--rounds", type=positive, default=1, help="runs of each, in turns; default: 1")
    parser.add_argument(
        "--seconds",
        type=float,
        default=60.0,
        help="to measure each run for, after its first update and at least one more; with --score: to train for "
        "(default: 60)",
    )
    parser.add_argument("--n-steps", type=positive, help="other rollouts than the job's (ppo 256, a2c 5, impala 32)")
    parser.add_argument("--output-dir", default="benchmarks/peers", metavar="DIR", help="default: benchmarks/peers")
    parser.add_argument(
        "--venvs",
        default=str(DEFAULT_FOLDER),
        metavar="DIR",
        help=f"where environments are made; default: {DEFAULT_FOLDER}",
    )
    parser.add_argument("--installed", action="store_true", help="use this interpreter for all: see above")
    parser.add_argument(
        "--score", action="store_true", help="train ours and sb3 for --seconds, play the same test levels"
    )
    parser.add_argument("--episodes", type=positive, default=500, help="of --score; default: 500")
    args = parser.parse_args(argv)
    try:
        Path(args.output_dir, "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-dir {args.output_dir} cannot be made ({error.strerror})")
    return args


if __name__ == "__main__":
    sys.exit(main())
