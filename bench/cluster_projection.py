"""Is the model of `rlcb scaling --project` right? Predicted against measured, on 1 to 4 machines.

    sudo venv/bin/python bench/cluster_projection.py --networks 100mbit
    sudo venv/bin/python bench/cluster_projection.py --networks 1gbit 100mbit --json check.json

Each machine is a network namespace with one worker. Where there are fewer cores than machines, every machine gets an
equal share of a core (a cgroup's quota), so that a machine that waits leaves its time to nobody. The prediction knows
what as many machines do beside each other without a word, what Gloo takes between two of them at full speed, and the
network's nominal rate; nothing of what it predicts. Needs root, iproute2 and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hosts import Hosts, missing
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.tools.checkup import expectation
from rl_cluster_benchmark.tools.checkup.hosts import marked
from rl_cluster_benchmark.tools.checkup.probe import Measurements, Sums
from rl_cluster_benchmark.tools.projection import inputs
from rl_cluster_benchmark.tools.scaling import model
from rl_cluster_benchmark.tools.scaling.measured_runs import Rate

ROOT = Path(__file__).parent.parent
MACHINES = 4
NETWORKS = {"10gbit": (0.1e-3, 10e9), "1gbit": (1e-3, 1e9), "100mbit": (10e-3, 100e6)}  # round trip, bits per second
STRATEGIES = {
    model.ALLREDUCE: (),
    model.COMPRESSED: ("cluster.compression=bfloat16",),
    model.LOCAL_SGD: ("cluster.sync=local_sgd",),
}
CGROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # of version 1, of version 2
PERIOD = 10_000  # microseconds
SPARE = 0.7  # of the cores, dealt to the machines


class Emulation:
    """The machines, the share of a core that each has, and what is run on them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.count = args, folder, 0
        self.hosts = Hosts(MACHINES)
        self.cores = sorted(os.sched_getaffinity(0))
        self.share = min(1.0, SPARE * len(self.cores) / MACHINES)
        self._groups = [self._make_group(index) for index in range(MACHINES)] if self.share < 1 else []

    def close(self) -> None:
        self.hosts.close()
        time.sleep(1)  # the workers of a machine that was killed end after it
        for group in self._groups:
            with contextlib.suppress(OSError):
                group.rmdir()

    def _make_group(self, index: int) -> Path:
        root = next(path for path in CGROUPS if (path / "cgroup.procs").exists())
        group = root / f"rlcb-check-{os.getpid()}-{index}"
        group.mkdir()
        quota = int(PERIOD * self.share)
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.shares").write_text("65536")  # before whatever else runs on this machine
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.weight").write_text("10000")
            (group / "cpu.max").write_text(f"{quota} {PERIOD}")
        return group

    def start(self, index: int, command: Sequence[object]) -> subprocess.Popen[str]:
        if self._groups:
            enter = ["bash", "-c", 'echo $$ > "$1"; shift; exec "$@"', "in", self._groups[index] / "cgroup.procs"]
            limited = [*enter, *self.hosts.call(index, command)]
        else:
            limited = ["taskset", "-c", str(self.cores[index]), *self.hosts.call(index, command)]
        environ = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            list(map(str, limited)), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def sums(self, nodes: int) -> Sums:
        """As `rlcb doctor --cluster` measures them."""
        where = ["--num-nodes", nodes, "--master-addr", self.hosts.address(0), "--json", "-"]
        call = [sys.executable, "-m", "rl_cluster_benchmark", "doctor", "--cluster", *where]
        texts = _outputs([self.start(rank, [*call, "--node-rank", rank]) for rank in range(nodes)])
        found = marked(texts[0])
        if found is None:
            raise SystemExit("\n".join(texts))
        sums = Measurements.from_dict(found).sums
        assert sums is not None
        return sums

    def train(self, nodes: int, settings: Sequence[str], *, apart: int = 1) -> list[Rate]:
        """A run on so many machines; or `apart` runs beside each other, on one machine each."""
        self.count += 1
        outputs = [self.folder / f"run-{self.count}-{number}" for number in range(apart)]
        started = []
        for number, output in enumerate(outputs):
            call = self._call(nodes, settings, output, head=number)
            started += [self.start(number + rank, [*call, "--node-rank", rank]) for rank in range(nodes)]
        _outputs(started)
        return [_rate(output) for output in outputs]

    def _call(self, nodes: int, settings: Sequence[str], output: Path, head: int) -> list[object]:
        args = self.args
        per_update = args.num_envs * args.n_steps * nodes
        keys = (f"training.n_steps={args.n_steps}", "training.n_epochs=2", f"cluster.sync_every={args.sync_every}",
                "logging.tensorboard=false", "parallel.pin=never", "training.log_interval=1", *settings)  # fmt: skip
        return [
            *(sys.executable, "-m", "rl_cluster_benchmark", "train", "--mode", "distributed", "--env", args.env),
            *("--num-envs", args.num_envs * nodes, "--batch-size", args.batch_size * nodes, "--workers-per-node", 1),
            *("--num-nodes", nodes, "--master-addr", self.hosts.address(head), "--output-dir", output),
            *("--total-timesteps", (args.updates - 1) * per_update),
            *(word for key in keys for word in ("--set", key)),
        ]


def _outputs(started: Sequence[subprocess.Popen[str]]) -> list[str]:
    try:
        texts = [process.communicate()[0] for process in started]
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(texts))
    return texts


def _rate(output: Path) -> Rate:
    """After the first update."""
    lines = [json.loads(line) for line in (output / "logs/PPO_Distributed/metrics.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    seconds = last["time"] - first["time"]
    shares = {
        name.removeprefix("time/"): (last[name] * last["time"] - first[name] * first["time"]) / seconds
        for name in last
        if name.startswith("time/")
    }
    times = tuple(b["time"] - a["time"] for a, b in itertools.pairwise(lines))
    summary = json.loads((output / "training_summary.json").read_text())
    return Rate((last["step"] - first["step"]) / seconds, len(lines) - 1, seconds, shares, 0.0, summary, times)


def work_of(emulation: Emulation, nodes: int) -> tuple[model.MachineWork, model.Spread]:
    """What so many machines do beside each other, without each other."""
    rates = emulation.train(1, (), apart=nodes)
    config = config_files.load(emulation.folder / f"run-{emulation.count}-0" / "config.yaml")
    works, spreads = [inputs.work_from(config, rate) for rate in rates], [inputs.spread_from(rate) for rate in rates]
    seconds = [work.seconds for work in works]
    mean = {
        key: statistics.mean(getattr(work, key) for work in works)
        for key in ("steps", "rollout_seconds", "minibatch_seconds")
    }
    spread = model.Spread(
        statistics.pstdev(seconds) / statistics.mean(seconds),
        statistics.mean(spread.jitter for spread in spreads),
        statistics.mean(seconds),
    )
    return model.MachineWork(**{**vars(works[0]), **mean}), spread


def check(emulation: Emulation) -> Iterator[dict[str, Any]]:
    software = expectation.network_of(emulation.sums(2))
    yield {"software": vars(software), "share of a core": emulation.share}
    for name in emulation.args.networks:
        round_trip, rate = NETWORKS[name]
        network = inputs.typical(software, round_trip=round_trip, bits_per_second=rate)
        for nodes in range(2, MACHINES + 1):
            work, spread = work_of(emulation, nodes)
            yield {"network": name, "nodes": nodes, "work": vars(work), "spread": vars(spread)}
            emulation.hosts.slow_down(round_trip_ms=1e3 * round_trip, rate=name)
            seen = _sums(emulation, nodes, network) + _runs(emulation, nodes, network, work, spread)
            yield from ({"network": name, "nodes": nodes} | row for row in seen)
            emulation.hosts.full_speed()


def _sums(emulation: Emulation, nodes: int, network: model.Network) -> list[dict[str, Any]]:
    measured = emulation.sums(nodes)
    half = model.ring_seconds(nodes, measured.size / 2 + model.EXACT_BYTES, network) + network.cast_seconds
    pairs = {
        "sum of 64 numbers, ms": (model.ring_seconds(nodes, 0, network), measured.small),
        "sum of a gradient, ms": (model.ring_seconds(nodes, measured.size, network), measured.gradient),
        "the same in bfloat16, ms": (half, measured.compressed),
    }
    return [{"what": what, "predicted": 1e3 * p, "measured": 1e3 * m} for what, (p, m) in pairs.items()]


def _runs(
    emulation: Emulation, nodes: int, network: model.Network, work: model.MachineWork, spread: model.Spread
) -> list[dict[str, Any]]:
    rows = []
    for strategy in emulation.args.strategies:
        (measured,) = emulation.train(nodes, STRATEGIES[strategy])
        expected = model.project(strategy, nodes, work, network, spread, sync_every=emulation.args.sync_every)
        rows.append({"what": f"{strategy}, steps/s", "predicted": expected.steps_per_second, "measured": measured.fps})
    return rows


def main() -> int:
    args = _arguments()
    reason = missing()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    os.nice(-10)  # the wires must not wait for somebody else's work
    results = []
    with tempfile.TemporaryDirectory(prefix="rlcb-check-") as folder:
        emulation = Emulation(args, Path(folder))
        try:
            for result in check(emulation):
                results.append(result)
                print(json.dumps(result), flush=True)
        finally:
            emulation.close()
    print(_table([result for result in results if "what" in result]))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| network | machines | | predicted | measured | predicted / measured |", "|-|-|-|-|-|-|"]
    for row in rows:
        ratio = row["predicted"] / row["measured"]
        lines.append(
            f"| {row['network']} | {row['nodes']} | {row['what']} | {row['predicted']:.1f} | {row['measured']:.1f} | "
            f"{ratio:.2f} |"
        )
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="coinrun", help="default: coinrun")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["1gbit", "100mbit"])
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--updates", type=int, default=7, help="of each run, the first is not measured; default: 7")
    parser.add_argument("--num-envs", type=int, default=8, help="of each machine; default: 8")
    parser.add_argument("--n-steps", type=int, default=16, help="default: 16")
    parser.add_argument("--batch-size", type=int, default=32, help="of each machine; default: 32")
    parser.add_argument("--sync-every", type=int, default=2, help="updates between averages of local_sgd; default: 2")
    parser.add_argument("--json", metavar="FILE", help="write all results to a file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
