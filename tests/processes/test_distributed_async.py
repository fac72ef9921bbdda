"""A3C and IMPALA on several machines: processes of this one, over the loopback interface."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from helpers.commands import rlcb
from helpers.machines import (
    FOREVER,
    TINY,
    Nodes,
    assert_gone,
    metrics,
    nodes_of,
    sequential_state,
    summary,
    train,
    wait_for_updates,
)
from helpers.processes import wait_for_updates as wait_until_updates
from helpers.processes import workers_of

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.execution.loop import build_algorithm
from rl_cluster_benchmark.execution.machines import machine_supervisor
from rl_cluster_benchmark.execution.machines.machine_averaging import MachineAveraging
from rl_cluster_benchmark.execution.machines.machine_links import MachineSeat
from rl_cluster_benchmark.execution.machines.other_machines import Corrections, IndependentMachines, News
from rl_cluster_benchmark.execution.messages import UpdateMade
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.machine.planning import plan
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.run import checkpoint

LABELS = {"a3c": "A3C_Distributed", "impala": "IMPALA_Distributed"}
EVERY_UPDATE = ("--set", "training.log_interval=1", "--set", "training.save_interval=4")
RATE = ("--learning-rate", 0.002, "--set", "training.gamma=0.99", "--set", "training.anneal_lr=true")
LEARNING = {
    "a3c": (*RATE, "--set", "training.n_steps=16"),
    "impala": (*RATE, "--set", "training.n_steps=20", "--batch-size", 160),
}


@pytest.fixture
def nodes():
    started = Nodes()
    yield started
    started.kill()


# The averaging rounds


SIZE, NUM_MACHINES, UPDATES = 7, 3, 40


class Vector:
    """Parameters that are changed at random moments; notes what was seen of them and added to them."""

    busy = False

    def __init__(self, start):
        self.now, self.snapshots, self.corrections = start, [], []

    def snapshot(self):
        self.snapshots.append(self.now.clone())
        return self.now.clone()

    def add(self, correction):
        self.corrections.append(correction)
        self.now += correction


def take_part_in_averaging(rank, connection, port):
    """A machine of a run: 40 updates of its own, at its own speed, while the machines talk."""
    generator = torch.Generator().manual_seed(rank)
    heard = []
    vector = Vector(torch.randn(SIZE, generator=generator))
    start, learned, updates = vector.now.clone(), torch.zeros(SIZE), 0
    seat = MachineSeat(rank, NUM_MACHINES, rank, NUM_MACHINES, ("127.0.0.1", port), "test", "lo", 10.0, "none")
    averaging = MachineAveraging(
        seat, counts=lambda: [10.0 * updates, updates, 1.0, 2.0, 3.0], exchange=vector, updates_between=15,
        hear=lambda *report: heard.append(report),
    )  # fmt: skip
    averaging.ready = True
    while not averaging.is_over:
        averaging.poll()
        if averaging.has_begun and updates < UPDATES:
            step = torch.randn(SIZE, generator=generator)
            vector.now += step
            learned += step
            updates += 1
            averaging.report(UpdateMade(updates, {}, at=0.0))
        averaging.done = updates == UPDATES
        averaging.signal = 10 if rank == 2 and updates > 5 else 0
        time.sleep(0.001 + 0.002 * rank)
    averaging.poll()  # nothing more happens
    told = {"signals": averaging.heard.signals, "elsewhere": averaging.elsewhere.tolist(), "heard": heard}
    seen = {"snapshots": vector.snapshots, "corrections": vector.corrections, "now": vector.now}
    tensors = checkpoint.pack({"start": start, "learned": learned, **seen})  # not by descriptors: this process ends
    connection.send((tensors, told))


def test_parameters_are_averaged_while_all_go_on():
    """Against the definition, with real processes: nobody's learning is lost, and in the end all have the same."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with WorkerPool(take_part_in_averaging, NUM_MACHINES, (store.port,), [None] * NUM_MACHINES) as pool:
        said = dict(pool.messages(lambda: None))
    machines = [checkpoint.unpack(said[rank][0]) for rank in range(NUM_MACHINES)]
    rounds = len(machines[0]["snapshots"])
    assert rounds >= 4, "every 15 updates of 120, and at the end"
    for number in range(rounds):
        mean = torch.stack([this["snapshots"][number] for this in machines]).mean(0)
        for this in machines:
            torch.testing.assert_close(this["corrections"][number], mean - this["snapshots"][number])
    expected = torch.stack([this["start"] + this["learned"] for this in machines]).mean(0)
    for this in machines:
        assert len(this["corrections"]) == rounds
        torch.testing.assert_close(this["now"], expected, atol=1e-5, rtol=1e-5)
    for rank in range(NUM_MACHINES):
        words = said[rank][1]
        assert words["signals"] == [0, 0, 10], "all know who received one"
        assert words["elsewhere"] == [800.0, 80.0, 2.0, 4.0, 6.0]
        by_machine = {node: [report.steps for n, report in words["heard"] if n == node] for node in range(NUM_MACHINES)}
        everything = list(range(1, UPDATES + 1))
        assert by_machine == dict.fromkeys(range(NUM_MACHINES), everything if rank == 0 else []), "once, in order"


def test_corrections_reach_all_learners_before_the_next_is_written():
    config = Config.model_validate({"algorithm": "impala", "env": {"name": "Catch-v0"}})
    learners = [
        build_algorithm(config, plan(config), (10, 5), 3, env_ids=(), reduce=Alone(), checkpoint=None)[1].learner
        for _ in range(2)
    ]
    size = len(learners[0].flat)
    flags = SharedTensors(machine_supervisor.layout() | IndependentMachines.layout(size))
    leader, ends = IndependentMachines(flags), [Corrections(flags) for _ in learners]
    before = learners[0].flat.clone()

    def write(value):
        assert flags["written"][0] == flags["taken"][0], "the node process waits for that"
        flags["parameters_correction"].fill_(value)
        flags["written"][0] += 1

    def step():
        number = leader.correction()
        for learner, end in zip(learners, ends, strict=True):
            end.add_to(learner, number)
        leader.step_done()

    step()
    write(0.5)
    step()
    assert int(flags["taken"][0]) == 0, "the other learner may be reading it still"
    step()
    write(0.25)
    step()
    for learner in learners:
        torch.testing.assert_close(learner.flat, before + 0.75)
    step()
    write(1.0)
    flags["closed"][0] = 1
    weights = PublishedWeights(PublishedWeights.allocate(size))
    leader.wait_for_end(learners[0], weights)
    torch.testing.assert_close(learners[0].flat, before + 1.75)
    published = torch.zeros(size)
    weights.read(published)
    torch.testing.assert_close(published, learners[0].flat)
    assert flags["written"][0] == flags["taken"][0]


def test_statistics_of_returns_are_those_of_all_machines():
    """Whatever anyone counts reaches every leader once."""
    flags = SharedTensors(machine_supervisor.layout() | IndependentMachines.layout(1))
    leader = IndependentMachines(flags)
    flags["elsewhere"][:] = torch.tensor([100.0, 2.0, 7.0, 8.0, 9.0])
    assert leader.agree(News(False, 0.1, 5, [1.0, 2.0, 3.0])).returns == [8.0, 10.0, 12.0]
    assert leader.agree(News(False, 0.1, 5, [1.0, 2.0, 3.0])).returns == [1.0, 2.0, 3.0]
    assert leader.steps == 100
    leader.update_done(10)
    leader.agree(News(True, 0.1, 5, [1.0, 1.0, 1.0]))
    assert flags["here"].tolist() == [10.0, 1.0, 2.0, 4.0, 6.0], "a step that is not taken does not count"


# Whole runs


def check_continuous(output, algorithm):
    """Every update has its line, every step counts once; returns the summary."""
    result, lines = summary(output), metrics(output, LABELS[algorithm])
    assert [line["update"] for line in lines] == list(range(1, result["total_updates"] + 1))
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    assert steps[-1] == result["total_timesteps"]
    state = checkpoint.load(output / "checkpoints" / f"{algorithm}_distributed_final.pt")
    assert state["progress"]["steps"] == result["total_timesteps"]
    return result


def test_machines_of_impala_sum_their_gradients(tmp_path):
    """A first step on the first unrolls, which depend on nobody's speed: 2 machines x 1 learner, 1 machine x 2."""
    states = []
    for name, count, learners in (("two", 2, 1), ("one", 1, 2)):
        args = ("--batch-size", 16 * 32, "--set", f"impala.num_learners={learners}", "--set", "impala.num_actors=1")
        train(tmp_path / name, *args, nodes=count, algorithm="impala", timesteps=1)
        states.append(checkpoint.load(tmp_path / name / "checkpoints" / "impala_distributed_final.pt"))
        assert summary(tmp_path / name)["num_learners"] == 2
    two, one = states
    assert two["progress"]["updates"] == one["progress"]["updates"] == 1
    assert two["progress"]["steps"] == one["progress"]["steps"] > 400
    assert two["algorithm"]["reward_normalizer"] == pytest.approx(one["algorithm"]["reward_normalizer"])
    for key, tensor in one["model"].items():
        torch.testing.assert_close(two["model"][key], tensor, atol=2e-5, rtol=1e-3, msg=key)
        for moment in ("exp_avg", "exp_avg_sq"):  # proportional to the gradient and its square
            ours, theirs = (state["algorithm"]["optimizer"]["moments"][moment][key] for state in states)
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-3, msg=f"{moment} of {key}")
            assert theirs.abs().max() > 0


@pytest.mark.long
def test_impala_learns_catch_on_two_machines(tmp_path):
    done = rlcb(
        "launch", "local", "--nodes", 2, "--", "train", "--config", "impala_cpu_cluster", *TINY, *EVERY_UPDATE,
        *LEARNING["impala"], "--total-timesteps", 120_000, "--output-dir", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = check_continuous(tmp_path, "impala")
    assert result["final_reward"] > 0.8
    assert 120_000 <= result["total_timesteps"] < 121_000, "all machines stop after the same step"
    assert result["num_episodes"] == pytest.approx(result["total_timesteps"] / 9, rel=0.03), "of all machines"
    assert (result["num_workers"], result["num_learners"], len(result["nodes"])) == (2, 2, 2)


@pytest.mark.cluster
def test_a3c_goes_on_when_a_machine_is_killed(launched, tmp_path):
    process = launched(
        "--nodes", 2, "--", "train", "--config", "a3c_cpu_cluster", *TINY, *EVERY_UPDATE, "--total-timesteps", 60_000,
        "--output-dir", tmp_path,
    )  # fmt: skip
    wait_until_updates(tmp_path, LABELS["a3c"], 20, process, seconds=200)
    nodes_of(process)[1].kill()
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 0, text
    for words in ("Restart 1 of 3, from the last checkpoint.", "Resumed from", "Parameter Exchanges: "):
        assert words in text, text
    assert "Traceback" not in text
    check_continuous(tmp_path, "a3c")


@pytest.mark.parametrize(
    ("algorithm", "sync"),
    [
        pytest.param("a3c", "async", marks=pytest.mark.cluster),
        pytest.param("impala", "allreduce", marks=pytest.mark.cluster),
        pytest.param("impala", "async", marks=pytest.mark.cluster),
    ],
)
def test_a_signal_to_one_machine_stops_all_and_the_run_goes_on(algorithm, sync, nodes, tmp_path):
    """And learns Catch."""
    args = (*EVERY_UPDATE, *LEARNING[algorithm], "--set", f"cluster.sync={sync}")
    _, other = nodes.start(tmp_path, *args, algorithm=algorithm, timesteps=240_000)
    wait_for_updates(tmp_path, 20, nodes, LABELS[algorithm])
    os.kill(other.pid, signal.SIGUSR1)
    for status, text in nodes.ends(timeout=60):
        assert status == 128 + signal.SIGUSR1, text
    first = summary(tmp_path)
    assert first["state"] == "interrupted"
    train(tmp_path, *args, "--resume", algorithm=algorithm, timesteps=240_000)
    result = check_continuous(tmp_path, algorithm)
    steps = [line["step"] for line in metrics(tmp_path, LABELS[algorithm])]
    assert steps[first["total_updates"] - 1] == first["total_timesteps"]
    assert result["initial_reward"] == first["initial_reward"]
    assert result["final_reward"] > 0.8
    assert (result["num_workers"], len(result["nodes"]), result["num_envs"]) == (2, 2, 16)
    assert 240_000 <= result["total_timesteps"] < 250_000
    if sync == "async":
        assert result["asynchrony"]["parameter_exchanges"] > 10


@pytest.mark.parametrize(
    ("algorithm", "sync", "victim"),
    [
        ("impala", "allreduce", "learner"),
        pytest.param("a3c", "async", "worker", marks=pytest.mark.cluster),
        pytest.param("impala", "async", "head", marks=pytest.mark.cluster),
    ],
)
def test_the_loss_of_a_part_ends_all_with_the_reason(algorithm, sync, victim, nodes, tmp_path):
    args = (*EVERY_UPDATE, "--set", f"cluster.sync={sync}")
    head, other = nodes.start(tmp_path, *args, algorithm=algorithm, timesteps=FOREVER)
    wait_for_updates(tmp_path, 5, nodes, LABELS[algorithm])
    everyone = nodes.workers()
    assert len(everyone) == (2 if algorithm == "a3c" else 4)
    lost_at = time.monotonic()
    if victim == "head":
        head.kill()
        survivors, reason = nodes.ends(timeout=60)[1:], "Lost contact with Node 0"
    else:
        workers_of(other)[0].kill()
        survivors, reason = nodes.ends(timeout=60), f"{victim.capitalize()} 0 was killed by SIGKILL"
        assert "Node 1 (" in survivors[0][1]
        assert reason in summary(tmp_path)["reason"]
    assert time.monotonic() - lost_at < 25, "cluster.timeout is 10 s"
    for status, text in survivors:
        assert status == 1, text
        assert reason in text, text
        assert "Traceback" not in text
    assert_gone(everyone)
    assert list((tmp_path / "checkpoints").glob("*.pt"))


@pytest.mark.cluster
def test_an_actor_that_dies_on_another_machine_is_replaced(nodes, tmp_path):
    _, other = nodes.start(tmp_path, *EVERY_UPDATE, algorithm="impala", timesteps=FOREVER)
    wait_for_updates(tmp_path, 3, nodes, LABELS["impala"])
    workers_of(other)[1].kill()
    deadline = time.monotonic() + 30
    while metrics(tmp_path, LABELS["impala"])[-1]["system/actor_restarts"] < 1:
        assert time.monotonic() < deadline
        assert other.poll() is None
        time.sleep(0.1)
    os.kill(other.pid, signal.SIGTERM)
    assert [status for status, _ in nodes.ends(timeout=60)] == [128 + signal.SIGTERM] * 2


@pytest.mark.cluster
def test_one_machine_with_one_worker_of_a3c_is_a2c(tmp_path):
    reference = sequential_state(tmp_path / "sequential", "a3c")
    train(tmp_path / "run", nodes=1, algorithm="a3c")
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "a3c_distributed_final.pt")
    assert state["progress"]["updates"] == reference["progress"]["updates"] >= 5
    for key, tensor in reference["model"].items():
        torch.testing.assert_close(state["model"][key], tensor, rtol=0, atol=0, msg=key)
    assert state["algorithm"]["reward_normalizer"] == reference["algorithm"]["reward_normalizer"]


@pytest.mark.cluster
def test_time_replay_and_compression(tmp_path):
    replay = ("--set", "impala.replay_fraction=0.5", "--set", "impala.replay_size=40")
    compression = ("--set", "cluster.compression=bfloat16")
    train(tmp_path, *replay, *compression, "--duration", 2 / 3600, algorithm="impala", timesteps=FOREVER)
    assert summary(tmp_path)["duration_hours"] * 3600 == pytest.approx(2, abs=1.5)
    assert summary(tmp_path)["state"] == "finished"


@pytest.mark.cluster
def test_machines_may_differ(tmp_path):
    """The second has more learners than its environments would need: it takes what there is."""
    own = (("impala.num_actors=2", "impala.num_learners=1"), ("impala.num_actors=1", "impala.num_learners=2"))

    def settings(rank):
        return [word for key in own[rank] for word in ("--set", key)]

    train(tmp_path, "--num-envs", 6, "--batch-size", 6 * 32, *EVERY_UPDATE, algorithm="impala", each=settings)
    result = check_continuous(tmp_path, "impala")
    assert (result["num_workers"], result["num_learners"], result["num_envs"]) == (3, 3, 6)


@pytest.mark.cluster
def test_nan_on_any_machine_stops_all(nodes, tmp_path):
    nodes.start(tmp_path / "run", "--learning-rate", "1e38", algorithm="a3c", timesteps=FOREVER)
    for status, text in nodes.ends(timeout=60):
        assert status == 1, text
        assert "NaN or infinite" in text
        assert "Traceback" not in text


@pytest.mark.parametrize(
    ("algorithm", "sync", "allowed"),
    [
        ("a3c", "allreduce", "async"),
        ("ppo", "async", "allreduce or local_sgd"),
        ("impala", "local_sgd", "allreduce or async"),
    ],
)
def test_a_strategy_that_does_not_suit_is_refused(algorithm, sync, allowed):
    sentence = f"cluster.sync = {sync} is not for {algorithm}; it can be {allowed}"
    with pytest.raises(UserError, match=sentence):
        config_files.load(None, {"algorithm": algorithm, "mode": "distributed", "cluster.sync": sync})
