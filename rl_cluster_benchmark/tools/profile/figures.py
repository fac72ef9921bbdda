"""The figures of a profile, from what the processes of the run and the kernel noted down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.profiling.stages import BACKWARD, FORWARD, INFERENCE, USAGE
from rl_cluster_benchmark.tools.profile.peak import Peak

if TYPE_CHECKING:
    from rl_cluster_benchmark.tools.profile.cost import Cost  # which imports torch

PASSES = (INFERENCE, FORWARD, BACKWARD)


@dataclass(frozen=True)
class Process:
    """One process of the run, over the measured time."""

    rank: int
    role: str  # worker, actor, learner
    seconds: float
    shares: dict[str, float]  # of its time by phase; with "other" they add up to one
    cpu: float  # cores' worth of CPU time
    usage: dict[str, float]  # faults and context switches per second
    pass_seconds: dict[str, float]  # of inference, forward and backward passes, and of each part in C
    samples: dict[str, float]
    operators: list[dict[str, Any]]  # while torch's profiler recorded, for `traced_seconds`
    traced_seconds: float

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"

    @classmethod
    def of(cls, notes: dict[str, Any], num_learners: int) -> Process:
        before, after = notes["before"], notes["after"]
        seconds = after["time"] - before["time"]
        shares = {name: (after["phases"][name] - value) / seconds for name, value in before["phases"].items()}
        rank, role = notes["rank"], "worker"
        if num_learners:
            role = "learner" if rank < num_learners else "actor"
            rank = rank if role == "learner" else rank - num_learners
        passes = {
            kind: {name: value - before["passes"][kind].get(name, 0) for name, value in after["passes"][kind].items()}
            for kind in ("seconds", "samples")
        }
        return cls(
            rank=rank,
            role=role,
            seconds=seconds,
            shares=shares | {"other": max(0.0, 1 - sum(shares.values()))},
            cpu=(after["cpu"] - before["cpu"]) / seconds,
            usage={name: (after[name] - before[name]) / seconds for name in USAGE},
            pass_seconds=passes["seconds"],
            samples=passes["samples"],
            operators=notes.get("operators", []),
            traced_seconds=notes.get("traced_seconds", 0.0),
        )


@dataclass(frozen=True)
class PassRate:
    """The speed of one kind of pass in one process."""

    samples: float  # a second of the pass, in one process
    gflops: float
    peak: float | None  # of the cores that the process has, in the precision in use

    @property
    def of_peak(self) -> float | None:
        return self.gflops / self.peak if self.peak else None


@dataclass(frozen=True)
class Profile:
    processes: list[Process]
    fps: float
    cores: list[float]  # how busy each of the machine's cores was, by whomever
    precision: str
    engine: str
    threads: int
    batch: int  # samples of an optimiser step, over all processes
    passes_per_step: float  # of training, for each environment step
    cost: Cost | None  # None where nobody counted, as for a run that is over
    peak: Peak | None
    run: dict[str, Any]  # its training_summary.json
    parents_cpu: float = 0.0  # cores' worth of time of the run's other processes: its parent, the server of workers
    shares_work: bool = False  # then those who learn divide the optimiser's step among them

    def of_role(self, *roles: str) -> list[Process]:
        return [process for process in self.processes if process.role in roles]

    def rate(self, kind: str) -> PassRate | None:
        """Return the speed of forward, backward or inference passes; None if there were none."""
        seconds = sum(process.pass_seconds.get(kind, 0.0) for process in self.processes)
        samples = sum(process.samples[kind] for process in self.processes)
        if not seconds or not samples or self.cost is None:
            return None
        flops = self.cost.backward_flops if kind == BACKWARD else self.cost.forward_flops
        busy = self.threads * len(self.processes)
        peak = self.peak.of(self.precision, self.threads, busy) if self.peak else None
        return PassRate(samples / seconds, samples / seconds * flops / 1e9, peak)

    @property
    def own_cpu(self) -> float:
        return sum(process.cpu for process in self.processes) + self.parents_cpu

    @property
    def others_cpu(self) -> float:
        """Return the cores' worth of time that something else took."""
        return max(0.0, sum(self.cores) - self.own_cpu)

    def traffic(self) -> tuple[float, float]:
        """Return GB/s to and from memory: if passes stay in the cache, and if all tensors go through memory."""
        assert self.cost is not None
        forward, backward = self.cost.bytes_at_most(self.precision)
        least, trained = self.cost.bytes_at_least(), self.fps * self.passes_per_step
        num_learning = max(1, len(self.of_role("worker", "learner")))
        steps = trained / self.batch * self.cost.bytes_per_step(num_learning, divided=self.shares_work)
        low = self.fps * 2 * least + trained * least + steps  # acting reads an observation and stores it
        high = self.fps * (least + forward) + trained * (forward + backward) + steps
        return low / 1e9, high / 1e9


def passes_per_step(config: Config) -> float:
    """Return how many training passes an environment step goes through; replayed experience is trained on again."""
    if config.traits.has_actors:
        return config.impala.passes / (1 - config.impala.replay_fraction)
    return float(config.training.n_epochs) if config.traits.has_minibatches else 1.0


def mean_shares(processes: Sequence[Process]) -> dict[str, float]:
    if not processes:
        return {}
    return {name: sum(p.shares[name] for p in processes) / len(processes) for name in processes[0].shares}
