"""`rlcb scaling --project`: the maths of the model against hand computation and simulation, and the command."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.commands import rlcb

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.core.timing import PHASES, PhaseClock
from rl_cluster_benchmark.execution.in_step.worker_course import WorkerCourse, layout
from rl_cluster_benchmark.execution.loop import Worker, learn
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.machines.machine_links import MachineSeat
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.machine import planning
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.tools.projection import inputs, projection
from rl_cluster_benchmark.tools.scaling import model
from rl_cluster_benchmark.tools.scaling.measured_runs import Rate
from rl_cluster_benchmark.tools.scaling.model import MachineWork, Network, Spread

WORK = MachineWork(steps=100, rollout_seconds=1.0, minibatch_seconds=0.5, minibatches=4, vector_bytes=100_000)
SLOW = Network(latency=0.01, bandwidth=1e6)
NO_SPREAD = Spread()


def gloo_ring(nodes, size, network):
    """Gloo's two loops, step by step: 2 n segments, of which two are under way; a link sends one after the other.

    A segment leaves when its receiver's word that it is ready has come, and then takes as long to arrive. All machines
    do the same at the same time, so the times of one are those of all.
    """
    sending, one_way, now, free = size / (2 * nodes) / network.bandwidth, network.latency / 2, 0.0, 0.0
    for _ in ("reduce-scatter", "all-gather"):
        sent, arrived = [], []
        for i in range(2 * nodes):
            if i >= 2:
                now = max(now, arrived[i - 2], sent[i - 2])
            if i < 2 * nodes - 2:
                free = max(now + one_way, free) + sending
                sent.append(free)
                arrived.append(free + one_way)
    return now


@pytest.mark.parametrize("nodes", [2, 3, 4, 17, 1000])
@pytest.mark.parametrize("latency", [0.0, 1e-5, 1e-3, 0.1])
def test_the_ring_is_what_gloo_does(nodes, latency):
    network = Network(latency, 125e6)
    assert model.ring_seconds(nodes, 2.5e6, network) == pytest.approx(gloo_ring(nodes, 2.5e6, network), rel=1e-9)


def test_ring_by_hand():
    # Four machines, 8 MB at 100 MB/s: segments of 1 MB, 10 ms each; bandwidth decides: twice 3 hops of 2 x 10 ms, and
    # the 1 ms until the last has arrived.
    assert model.ring_seconds(4, 8e6, Network(1e-3, 1e8)) == pytest.approx(2 * (3 * 0.02 + 0.001))
    # A thousand machines, 2.5 MB at 10 Gbit/s: segments of 1,250 bytes, 1 us each; latency decides: 1998 x 101 us.
    assert model.ring_seconds(1000, 2.5e6, Network(1e-4, 1.25e9)) == pytest.approx(2 * (999 * 101e-6 + 1e-6))
    assert model.ring_seconds(1, 8e6, SLOW) == 0
    assert model.ring_seconds(5, 0, SLOW) == pytest.approx(8 * 0.01)


@pytest.mark.parametrize("nodes", [2, 4, 50])
@pytest.mark.parametrize("network", [Network(1e-6, 1e8), Network(1e-3, 1e9), Network(0.02, 3e9)])
def test_a_network_is_found_again_from_its_times(nodes, network):
    times = [model.ring_seconds(nodes, size, network) for size in (0, 2_500_000)]
    found = model.network_from(nodes, times[0], 2_500_000, times[1])
    assert found.latency == pytest.approx(network.latency)
    assert found.bandwidth == pytest.approx(network.bandwidth)


def test_expected_maximum():
    assert model.expected_maximum(1) == 0
    assert model.expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert model.expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi))
    assert model.expected_maximum(1000) == pytest.approx(3.2414, abs=1e-4)  # Tippett's table
    draws = np.random.default_rng(0).standard_normal((20_000, 16)).max(1)
    assert model.expected_maximum(16) == pytest.approx(draws.mean(), abs=0.02)


def test_waiting_by_hand():
    # 10 s of work, 3% between machines, 4% from piece to piece: hypot = 5% of 10 s times 0.5642.
    assert model.waiting_seconds(2, 10, Spread(0.03, 0.04, 10)) == pytest.approx(0.5 / math.sqrt(math.pi))
    # Four pieces of 2.5 s: their jitter is halved.
    expected = 10 * math.hypot(0.03, 0.02) / math.sqrt(math.pi)
    assert model.waiting_seconds(2, 10, Spread(0.03, 0.04, 2.5)) == pytest.approx(expected)
    assert model.waiting_seconds(1, 10, Spread(0.03, 0.04)) == 0
    assert model.waiting_seconds(8, 0, Spread(0.03, 0.04)) == 0


@pytest.mark.parametrize(("strategy", "barriers"), [("allreduce", True), ("local_sgd", False)])
def test_waiting_as_simulated(strategy, barriers):
    """Machines of different speed, with jitter, that meet after every minibatch or once an update."""
    nodes, spread, draw = 8, Spread(0.05, 0.1, piece_seconds=0.5), np.random.default_rng(1)
    updates = 4000
    speeds = 1 + spread.between * draw.standard_normal((updates, nodes, 1))
    lengths = np.array([WORK.rollout_seconds, *[WORK.minibatch_seconds] * WORK.minibatches])
    jitter = spread.jitter * np.sqrt(spread.piece_seconds / lengths)
    times = lengths * (speeds + jitter * draw.standard_normal((updates, nodes, len(lengths))))
    slowest = times.max(1).sum(1) if barriers else times.sum(2).max(1)
    fast = Network(0.0, 1e15)
    assert model.project(strategy, nodes, WORK, fast, spread).seconds == pytest.approx(slowest.mean(), rel=0.005)


def test_projections_by_hand():
    # Two machines; 100 kB in segments of 25 kB, 25 ms each: a sum takes 2 x (50 + 10) ms, a small one 20 ms.
    allreduce = model.project("allreduce", 2, WORK, SLOW, NO_SPREAD)
    assert allreduce.communication == pytest.approx(4 * 0.12 + 6.5 * 0.02)
    assert allreduce.steps_per_second == pytest.approx(200 / 3.61)
    assert allreduce.efficiency == pytest.approx(3 / 3.61)
    # In bfloat16 50,256 bytes: 12.564 ms a segment, a hop of 25.128 ms, 10 ms to arrive; and 7 ms to round.
    network = Network(0.01, 1e6, cast_seconds=0.007)
    half = model.project("allreduce bfloat16", 2, WORK, network, NO_SPREAD)
    assert half.communication == pytest.approx(4 * (2 * 0.035128 + 0.007) + 6.5 * 0.02)
    # Every second update three vectors and a small sum; 4.5 small sums in every update.
    alone = model.project("local_sgd", 2, WORK, SLOW, NO_SPREAD, sync_every=2)
    assert alone.communication == pytest.approx(4.5 * 0.02 + (3 * 0.12 + 0.02) / 2)
    free = model.project("async", 1000, WORK, SLOW, Spread(0.1, 0.1))
    assert (free.efficiency, free.steps_per_second) == (1.0, pytest.approx(1000 * 100 / 3))
    for strategy in model.STRATEGIES:
        one = model.project(strategy, 1, WORK, SLOW, Spread(0.1, 0.1))
        assert (one.efficiency, one.waiting, one.communication) == (1.0, 0.0, 0.0)


def test_updates_between_averages():
    assert model.updates_between_averages("allreduce", 8, WORK, SLOW, sync_every=4) is None
    assert model.updates_between_averages("local_sgd", 8, WORK, SLOW, sync_every=4) == 4
    assert model.updates_between_averages("async", 2, WORK, SLOW, sync_every=4) == 4
    # 1998 hops of 10.05 ms are 20 s: more than six updates of 3 s.
    found = model.updates_between_averages("async", 1000, WORK, SLOW, sync_every=4)
    assert found == pytest.approx(2 * (999 * 0.01005 + 0.00005) / 3)


class Counting(Alone):
    """A reducer that counts what would cross the network."""

    def __init__(self):
        self.vectors = self.small = 0

    def vector(self, size):
        return torch.zeros(size)

    def __call__(self, tensor):
        if tensor.dtype == torch.float32 and tensor.dim() == 1:
            self.vectors += 1
        else:
            self.small += 1
        return tensor

    total = running_sum = __call__


class Nobody:
    def send(self, message):
        pass


def test_the_model_counts_the_sums_that_an_update_makes():
    """All of them but the last two of an update, by which the leaders gather episodes: a sum, and half of one."""
    config = config_files.load(None, {
        "env.name": "Catch-v0", "env.num_envs": 8, "training.n_steps": 16, "training.batch_size": 32,
        "training.n_epochs": 3, "training.total_timesteps": 250, "training.normalize_reward": True,
    })  # fmt: skip
    shared, clock = SharedTensors(layout(1, 8 * 16)), PhaseClock()
    nothing = {"steps": 0, "updates": 0, "elapsed": 0.0, "phase_seconds": dict.fromkeys(PHASES, 0.0)}
    reduce = Counting()
    plan = replace(planning.plan(config), num_workers=1)
    seat = MachineSeat.of(MachineAlone(plan, Signals()), config)
    course = WorkerCourse(0, seat, Nobody(), config, shared, nothing, clock=clock, reduce=reduce)
    worker = Worker.build(config, plan, env_ids=range(8), reduce=reduce, clock=clock, incarnation=0, checkpoint=None)
    learn(worker, course, reduce)
    rate = Rate(100.0, course.updates, 10.0, dict.fromkeys(("update", "communication", "waiting"), 0.2), 0.0, {})
    work = inputs.work_from(config, rate)
    assert course.updates >= 2
    assert reduce.vectors == course.updates * work.minibatches
    assert reduce.small == 1 + course.updates * (work.small_sums - 1.5)  # one before the first update


def test_work_is_divided_as_it_was_measured():
    config = config_files.load(None, {
        "env.name": "Catch-v0", "env.num_envs": 8, "training.n_steps": 16, "training.batch_size": 32,
        "training.n_epochs": 3, "training.normalize_reward": False,
    })  # fmt: skip
    shares = {"env": 0.1, "inference": 0.15, "update": 0.6, "communication": 0.05, "waiting": 0.05, "other": 0.05}
    rate = Rate(fps=64.0, updates=5, seconds=10.0, shares=shares, busy_cores=1.0, summary={}, update_seconds=(1, 3))
    work = inputs.work_from(config, rate)
    assert work.steps == pytest.approx(128)
    assert work.rollout_seconds == pytest.approx(0.6)
    assert (work.minibatches, work.minibatch_seconds) == (12, pytest.approx(1.4 / 12))
    assert work.seconds == pytest.approx(2.0)
    assert work.small_sums == 5.5
    assert inputs.spread_from(rate) == Spread(0.0, 0.5, 2.0)


@pytest.mark.parametrize(
    ("algorithm", "passes", "batch", "steps"),
    [
        ("ppo", 1, 32, 4 * 4),
        ("a2c", 1, 8 * 16, 1),
        ("a3c", 1, 2 * 16, 1),
        ("impala", 1, 2 * 16, 4),
        ("impala", 3, 2 * 16, 3 * 4),
    ],
)
def test_a_step_has_the_samples_that_it_learns_from(algorithm, passes, batch, steps):
    """Eight environments of four workers: A3C's step alone, IMPALA's learners take two unrolls a step."""
    config = config_files.load(None, {
        "algorithm": algorithm, "mode": "parallel", "env.name": "Catch-v0", "env.num_envs": 8, "training.n_steps": 16,
        "training.batch_size": 32, "training.n_epochs": 4, "impala.passes": passes,
    })  # fmt: skip
    summary = {"num_envs": 8, "num_workers": 4, "num_learners": 2 if algorithm == "impala" else 0}
    shares = dict.fromkeys(("update", "communication", "waiting"), 0.2)
    rate = Rate(100.0, 5, 10.0, shares, 0.0, summary)
    assert inputs.work_from(config, rate).minibatches == steps
    assert inputs.optimizer_steps(config, summary) == (batch, steps)


@pytest.mark.parametrize("algorithm", ["PPO", "IMPALA"])
def test_machines_that_step_alone_keep_their_minibatch(algorithm):
    measured = inputs.Measured(WORK, Spread(), SLOW, 8, 256, {"algorithm": algorithm})
    settings = projection.ProjectionSettings([1, 16], 1.0, Path(), False, None, None, None, None, None)
    rows = projection.make_report(measured, settings)["rows"]
    sizes = {row["strategy"]: row["minibatch"] for row in rows if row["nodes"] == 16}
    together = {"allreduce": 16 * 256, "allreduce bfloat16": 16 * 256, "local_sgd": 256}
    assert sizes == ({"async": 256} | (together if algorithm == "PPO" else {}))


@pytest.fixture(scope="module")
def projected(tmp_path_factory):
    """A projection from a real measurement on this machine."""
    output = tmp_path_factory.mktemp("projection")
    done = rlcb(
        "scaling", "--project", "--env", "Catch-v0", "--workers", 1, "--seconds", 0.5, "--set", "training.n_steps=32",
        "--set", "parallel.pin=never", "--batch-size", 128, "--output-dir", output,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout


@pytest.mark.cluster
def test_a_projection_of_this_machine(projected):
    output, text = projected
    report = json.loads((output / "projection.json").read_text())
    assert report["nodes"] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert len(report["rows"]) == 3 * 4 * 11
    work = report["measured"]["work"]
    assert work["minibatches"] == 4 * 4, "16 environments x 32 steps in minibatches of 128, four times"
    seconds = work["rollout_seconds"] + work["minibatches"] * work["minibatch_seconds"]
    for row in report["rows"]:
        assert 0 < row["efficiency"] <= 1
        assert row["steps_per_second"] == pytest.approx(row["nodes"] * work["steps"] / seconds * row["efficiency"])
    software = report["measured"]["software"]
    assert 1e-6 < software["latency"] < 0.1
    assert 1e7 < software["bandwidth"] < 1e12
    for words in ("10 Gbit/s, 0.1 ms", "80% is kept up to", "Assumed:", "1,000", *report["assumptions"]):
        assert words in text
    with (output / "projection.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(report["rows"])
    assert (output / "projection.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.cluster
def test_another_network_needs_no_new_measurement(projected, tmp_path):
    first = projected[0] / "projection.json"
    again = ("scaling", "--project", "--measured", first, "--output-dir", tmp_path)
    done = rlcb(*again, "--bandwidth", "1gbit", "--round-trip", "200us", "--nodes", "2,64", "--spread", "0.05")
    assert done.returncode == 0, done.stderr
    report, before = (json.loads((path / "projection.json").read_text()) for path in (tmp_path, projected[0]))
    assert report["measured"] == before["measured"]
    assert list(report["networks"]) == ["1 Gbit/s, 0.2 ms"]
    assert report["nodes"] == [1, 2, 64]
    software, network = before["measured"]["software"], report["networks"]["1 Gbit/s, 0.2 ms"]
    assert network["latency"] == pytest.approx(software["latency"] + 2e-4)
    assert network["bandwidth"] == min(125e6, software["bandwidth"])
    assert report["spread"]["between"] == 0.05
    refused = rlcb(*again, "--bandwidth", "1gbit")
    assert refused.returncode == 2
    assert "already holds a projection; add --overwrite" in refused.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--bandwidth", "fast"), "fast is not understood; write it as 10gbit, 100mbit"),
        (("--round-trip", "3"), "3 is not understood; write it as 0.1ms, 50us"),
        (("--nodes", "0,2"), "0,2 is not allowed; write numbers of machines as 1,2,4"),
        (("--spread", "2"), "2 is not allowed; it must be a number from 0 to 1"),
        (("--network", "a.json", "--bandwidth", "1gbit"), "--network has a bandwidth and a round trip of its own"),
        (("--workers", "1,2"), "--workers is one number: the workers of each machine"),
        (("--repeats", "2"), "belong to a sweep over workers, not to --project"),
    ],
)
def test_wrong_input_is_answered_with_a_sentence(args, sentence, capsys):
    try:
        status = main.main(["scaling", "--project", *args])
    except SystemExit as end:  # argparse
        status = end.code
    assert status == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--network", "/no/such.json"), "/no/such.json was not written by `rlcb doctor --cluster --json`"),
        (("--measured", "setup.sh"), "setup.sh is no projection.json of `rlcb scaling --project`"),
    ],
)
def test_files_of_others_are_refused(args, sentence, tmp_path):
    done = rlcb("scaling", "--project", "--output-dir", tmp_path, *args)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("projection*"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda measured: measured["run"].clear(), "it lacks algorithm, env"),
        (lambda measured: measured["work"].update(steps="many"), "work.steps: Input should be a valid number"),
        (lambda measured: measured["work"].update(rollout_seconds=0, minibatches=0), "it lacks the time of an update"),
        (lambda measured: measured.pop("batch"), "batch: Field required"),
    ],
)
def test_a_damaged_projection_is_refused(damage, sentence, projected, tmp_path):
    report = json.loads((projected[0] / "projection.json").read_text())
    damage(report["measured"])
    (tmp_path / "damaged.json").write_text(json.dumps(report))
    done = rlcb("scaling", "--project", "--measured", tmp_path / "damaged.json", "--output-dir", tmp_path / "out")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_no_flags_of_clusters():
    text = rlcb("scaling", "--help").stdout
    for flag in ("--num-nodes", "--workers-per-node", "--master-addr", "--master-port"):
        assert flag not in text
    assert "how to read a projection" in text
