"""Two machines over an emulated network: env steps per second, time in communication and reward of each strategy.

    sudo venv/bin/python bench/cluster_network.py            # networks x strategies, three rounds
    sudo venv/bin/python bench/cluster_network.py --rounds 1 --networks 1gbit --strategies allreduce
    sudo venv/bin/python bench/cluster_network.py --algorithm impala --strategies allreduce async

Each machine is a network namespace with one worker (IMPALA: an actor and a learner), pinned to a core of its own; `tc
netem` gives the link its rate and round trip (on a kernel without it, wires.py does, but for the 0.1 ms of the
fastest). Every round also measures one machine alone, so that each ratio compares runs next to each other in time.
Needs root, two idle cores and iproute2. On a busy machine the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from hosts import Hosts, missing

ROOT = Path(__file__).parent.parent
NETWORKS = {"10gbit": (0.1, "10gbit"), "1gbit": (1.0, "1gbit"), "100mbit": (10.0, "100mbit")}  # round trip ms, rate
STRATEGIES = {
    "allreduce": (),
    "allreduce bfloat16": ("cluster.compression=bfloat16",),
    "local_sgd": ("cluster.sync=local_sgd",),
    "async": ("cluster.sync=async",),
}
SUITABLE = {
    "ppo": ("allreduce", "allreduce bfloat16", "local_sgd"),
    "a2c": ("allreduce", "allreduce bfloat16", "local_sgd"),
    "a3c": ("async",),
    "impala": ("allreduce", "allreduce bfloat16", "async"),
}
ALONE = "one machine"


def main() -> int:
    args = _arguments()
    reason = missing()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 2
    results: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    hosts = Hosts(2)
    try:
        for number in range(args.rounds):
            results["", ALONE].append(_measure(hosts, 1, STRATEGIES[args.strategies[0]], args))
            for network in args.networks:
                round_trip, rate = NETWORKS[network]
                hosts.slow_down(round_trip_ms=round_trip, rate=rate)
                for strategy in args.strategies:
                    results[network, strategy].append(_measure(hosts, 2, STRATEGIES[strategy], args))
                    print(f"round {number + 1}: {network} {strategy}: {results[network, strategy][-1]}", flush=True)
                hosts.full_speed()
    finally:
        hosts.close()
    print(_table(results))
    if args.json:
        named = {f"{network} {strategy}".strip(): runs for (network, strategy), runs in results.items()}
        Path(args.json).write_text(json.dumps(named, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=SUITABLE, default="ppo", help="default: ppo")
    parser.add_argument("--env", default="coinrun", help="default: coinrun")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--updates", type=int, default=6, help="of each run, the first is not measured; default: 6")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, help="default: those that suit the algorithm")
    parser.add_argument("--num-envs", type=int, default=32, help="of all machines together; default: 32")
    parser.add_argument("--n-steps", type=int, default=128, help="default: 128")
    parser.add_argument("--batch-size", type=int, default=1024, help="default: 1024")
    parser.add_argument("--sync-every", type=int, default=2, help="updates between averages of local_sgd; default: 2")
    parser.add_argument("--json", metavar="FILE", help="write all results to a file")
    args = parser.parse_args()
    args.strategies = args.strategies or SUITABLE[args.algorithm]
    return args


def _measure(hosts: Hosts, nodes: int, settings: tuple[str, ...], args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="rlcb-bench-") as folder:
        output = Path(folder, "run")
        keys = (f"training.n_steps={args.n_steps}", "training.n_epochs=3", f"cluster.sync_every={args.sync_every}",
                "training.log_interval=1", "logging.tensorboard=false", "parallel.pin=never", *settings)  # fmt: skip
        call = [sys.executable, "-m", "rl_cluster_benchmark", "train", "--algorithm", args.algorithm, "--mode",
                "distributed", "--env", args.env, "--num-envs", args.num_envs, "--batch-size",
                args.batch_size, "--workers-per-node", 1, "--num-nodes", nodes, "--master-addr", hosts.address(0),
                "--output-dir", output, "--total-timesteps",
                (args.updates - 1) * args.num_envs * args.n_steps]  # fmt: skip
        call += [word for key in keys for word in ("--set", key)]
        cores = sorted(os.sched_getaffinity(0))
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        started = [
            subprocess.Popen(
                hosts.call(rank, ["taskset", "-c", cores[rank], *call, "--node-rank", rank]),
                env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(nodes)
        ]  # fmt: skip
        texts = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit("\n".join(texts))
        return _figures(output / "logs" / f"{args.algorithm.upper()}_Distributed" / "metrics.jsonl")


def _figures(log: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    first, last = lines[0], lines[-1]
    seconds = last["time"] - first["time"]
    talking = sum(
        last[f"time/{phase}"] * last["time"] - first[f"time/{phase}"] * first["time"]
        for phase in ("communication", "waiting")
    )
    return {
        "steps_per_second": (last["step"] - first["step"]) / seconds,
        "communication": talking / seconds,
        "reward": last.get("charts/episodic_return", float("nan")),
    }


def _table(results: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    alone = results["", ALONE]
    rows = [
        "| network | strategy | steps/s (median) | times one machine (each round) | communication | reward |",
        "|-|-|-|-|-|-|",
    ]
    for (network, strategy), runs in results.items():
        ratios = [run["steps_per_second"] / one["steps_per_second"] for run, one in zip(runs, alone, strict=True)]
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        rows.append(
            f"| {network or '-'} | {strategy} | {middle['steps_per_second']:,.0f} | "
            f"{', '.join(f'{ratio:.2f}' for ratio in ratios)} | {middle['communication']:.1%} | "
            f"{middle['reward']:.2f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
