"""IMPALA's actors and learners: what they share, and whole runs with real processes."""

import dataclasses
import itertools
import json
import random
import resource
import signal
import threading
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.commands import read_metrics, rlcb, started_with
from helpers.processes import assert_gone, running, wait_for_line, wait_for_updates, workers_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.timing import PHASES, PhaseClock
from rl_cluster_benchmark.execution.actor_learner.machines_updates import MachinesUpdates, UpdateRecorder
from rl_cluster_benchmark.execution.actor_learner.replay import ReplayFile
from rl_cluster_benchmark.execution.actor_learner.split import Costs, fill_in, split
from rl_cluster_benchmark.execution.actor_learner.unrolls import UnrollStore, gather, unroll_layout
from rl_cluster_benchmark.execution.messages import EpisodesEnded, ProcessTimes, Reports, StateToSave, UpdateMade
from rl_cluster_benchmark.execution.task import Task
from rl_cluster_benchmark.machine import detection, planning
from rl_cluster_benchmark.processes.claims import Claims
from rl_cluster_benchmark.processes.pool import WorkerPool
from rl_cluster_benchmark.processes.published_weights import PublishedWeights
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.metrics import Asynchrony

LABEL = "IMPALA_Parallel"
TINY = ("--algorithm", "impala", "--mode", "parallel", "--env", "Catch-v0", "--set", "training.n_steps=16",
        "--set", "parallel.pin=never", "--num-threads", 1, "--num-workers", 2, "--num-envs", 12,
        "--batch-size", 96)  # fmt: skip
TASK = Task(observation_shape=(3,), observation_dtype=torch.float32, num_actions=2, num_parameters=5)


def train(output, *args, timesteps=3000):
    return rlcb("train", *TINY, "--total-timesteps", timesteps, "--output-dir", output, *args)


def summary(output):
    return json.loads((output / "training_summary.json").read_text())


# Weights

PUBLISHES, SIZE = 100_000, 4096


def _checked(vector):
    """The last number is a checksum of the others."""
    vector[-1] = torch.tensor(zlib.crc32(vector[:-1].numpy().tobytes()) % 2**24, dtype=torch.float32)
    return vector


def publish_or_read(rank, connection, memory):
    weights = PublishedWeights(memory)
    if rank == 0:
        generator = torch.Generator().manual_seed(0)
        versions = [_checked(torch.rand(SIZE, generator=generator)) for _ in range(97)]
        for number in range(PUBLISHES):
            weights.publish(versions[number % len(versions)])
        connection.send(PUBLISHES)
        return
    mine, version, reads = torch.zeros(SIZE), 0, 0
    while version < PUBLISHES:
        if weights.version == 0:
            continue
        newer = weights.read(mine)
        assert newer >= version, "versions never go back"
        assert mine[-1] == zlib.crc32(mine[:-1].numpy().tobytes()) % 2**24, f"version {newer} was read half-written"
        version, reads = newer, reads + 1
    connection.send(reads)


def test_weights_are_never_read_half_written():
    """100,000 versions, published as fast as possible while two processes read them and check each."""
    memory = PublishedWeights.allocate(SIZE)
    with WorkerPool(publish_or_read, 3, (memory,), [None] * 3) as pool:
        counts = dict(pool.messages(lambda: None))
    memory.close()
    assert counts[0] == PUBLISHES
    assert min(counts[1], counts[2]) > 1000


# Unrolls


def make_store(shards, n_steps=2, pages=2):
    sizes = {"num_actors": len(shards), "envs_per_actor": max(map(len, shards))}
    return UnrollStore(UnrollStore.allocate(TASK, **sizes, n_steps=n_steps, pages_per_actor=pages), shards)


@pytest.mark.parametrize("seed", range(20))
def test_every_unroll_is_learned_from_once(seed):
    """Actors, the leader and sudden deaths in any order: nothing lost, nothing twice, nothing changed while read."""
    chance = random.Random(seed)
    shards = [[0, 1, 2], [3, 4], [5, 6]]
    store = make_store(shards, pages=chance.choice([2, 3]))
    writing = dict.fromkeys(range(3))  # actor -> the page that it has in hand
    published, learned, serial = set(), [], 0
    reading = np.empty(0, dtype=np.int64)
    expected = {}
    for _ in range(600):
        what = chance.choice(["act", "act", "hand out", "release", "die"])
        actor = chance.randrange(3)
        if what == "act" and writing[actor] is None:
            writing[actor] = store.free_page(actor)
            if writing[actor] is not None:
                store.rollout(actor, writing[actor]).actions.fill_(-1)
        elif what == "act":
            rollout = store.rollout(actor, writing[actor])
            for env in range(len(shards[actor])):
                serial += 1
                rollout.actions[:, env] = serial
                published.add(serial)
            store.publish(actor, writing[actor], version=serial, return_moments=torch.zeros(len(shards[actor]), 3))
            writing[actor] = None
        elif what == "die":
            writing[actor] = None  # what it had in hand is lost; another starts anew
        elif what == "hand out" and not len(reading):
            reading = store.full()[: chance.randint(1, 5)]
            expected = {int(row): store["actions"][row].tolist() for row in reading}
        elif what == "release" and len(reading):
            for row in reading:
                assert store["actions"][row].tolist() == expected[int(row)], "written while it was read"
                learned.append(expected[int(row)][0])
            store.release(reading)
            reading = np.empty(0, dtype=np.int64)
        assert len(store.full()) <= store.capacity
    store.release(reading)
    learned += [numbers[0] for numbers in expected.values()] if len(reading) else []
    rest = store.full()
    learned += [int(store["actions"][row][0]) for row in rest]
    assert len(learned) == len(set(learned)), "twice"
    assert set(learned) == published, "lost, or never made"


def test_the_oldest_come_first_and_actors_wait_for_room():
    store = make_store([[0, 1], [2]])
    for actor, page in ((1, 2), (0, 0), (0, 1), (1, 3)):
        assert store.free_page(actor) == page
        moments = torch.ones(len(store.shards[actor]), 3)
        store.publish(actor, page, version=7, return_moments=moments)
    assert store.free_page(0) is None
    assert store.full().tolist() == [4, 0, 1, 2, 3, 6], "by age; row 5 and 7 do not exist: actor 1 has one environment"
    assert store.capacity == 6
    store.release(np.array([0]))
    assert store.free_page(0) is None, "half a page is no room"
    store.release(np.array([1]))
    assert store.free_page(0) == 0
    assert store.versions(np.array([4])).tolist() == [7]
    assert store.ages(np.array([4]))[0] >= 0


def test_unrolls_are_read_where_they_lie():
    store = make_store([[0, 1]], n_steps=4)
    rollout = store.rollout(0, 1)
    rollout.observations[:] = torch.arange(4 * 2 * 3).view(4, 2, 3).float()
    rollout.last_observations[:] = 99.0
    rollout.actions[:] = torch.arange(8).view(4, 2)
    unrolls = gather([(store, 2), (store, 3)])  # rows of page 1
    torch.testing.assert_close(unrolls.actions, torch.arange(8).view(4, 2))
    torch.testing.assert_close(unrolls.observations[1], rollout.observations[:, 1])
    assert unrolls.observations[1].data_ptr() == rollout.observations[0, 1].data_ptr(), "no copy"
    assert unrolls.observations[1].is_contiguous()
    assert float(unrolls.last_observations[0].min()) == 99.0


def test_work_is_taken_once():
    claims, taken = Claims(), []
    claims.offer(range(2000))

    def take():
        while (number := claims.take()) is not None:
            taken.append(number)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claims.close()
    assert sorted(taken) == list(range(2000))


@pytest.mark.parametrize(
    ("act", "learn", "cores", "expected"),
    [(1.0, 1.0, 16, (8, 8)), (1.0, 3.0, 16, (4, 12)), (1.0, 100.0, 16, (1, 15)), (3.0, 1.0, 4, (3, 1))],
)
def test_cores_are_split_by_cost(act, learn, cores, expected):
    assert split(Costs(lambda actors: act, learn), cores, unrolls=10_000) == expected


def test_learners_that_wait_for_each_others_last_unroll_need_more_cores():
    """5 actors and 11 learners take 13.58 steps/ms, were it not for the end of a step: then 4 and 12 take more."""
    costs = Costs(act=lambda actors: 0.33e-3, learn=0.81e-3)
    assert split(costs, 16, unrolls=10_000) == (5, 11)
    assert split(costs, 16, unrolls=33) == (4, 12)


def test_actors_get_as_many_environments_as_the_network_likes():
    """It computes 16 at a time: with 5 actors of 13 environments each, a fifth of that is for nothing."""
    costs = Costs(act=lambda actors: 0.3e-3 * (16 * -(-64 // actors // 16)) / (64 / actors), learn=0.78e-3)
    assert split(costs, 16, unrolls=33) == (4, 12)
    assert split(Costs(lambda actors: 0.37e-3, 0.78e-3), 16, unrolls=33) == (5, 11)


def test_whatever_is_left_open_is_filled_in(monkeypatch, capsys):
    """Measured with the run's own network where both numbers are open."""
    machine = dataclasses.replace(detection.detect(), usable_cores=6)
    monkeypatch.setattr(detection, "detect", lambda: machine)
    monkeypatch.setattr("rl_cluster_benchmark.execution.actor_learner.split.SECONDS", 0.05)

    splits = []

    def filled(num_envs=24, **impala):
        data = {"algorithm": "impala", "mode": "parallel", "env": {"name": "Catch-v0", "num_envs": num_envs}}
        config = fill_in(Config.model_validate(data | {"impala": impala}))
        assert config.impala.num_actors is None
        assert fill_in(config) == config, "a run that is resumed keeps its split"
        splits.append(config.impala.split)
        return config.parallel.num_workers, config.impala.num_learners

    assert sum(filled()) == 6
    assert "Split of 6 cores" in capsys.readouterr().out
    assert filled(num_learners=4) == (2, 4)
    assert filled(num_actors=1) == (1, 5)
    assert filled(num_actors=9) == (9, 1)
    assert filled(num_envs=2, num_actors=2) == (2, 2), "no more learners than environments"
    assert splits == ["measured", *["given"] * 4]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("cores", "actors", "expected"),
    [(1, None, (1, 1)), (2, None, (1, 2)), (2, 4, (4, 2)), (8, 8, (8, 4)), (8, 7, (7, 1)), (16, 4, (4, 12))],
)
def test_learners_share_the_cores_of_actors_that_leave_none(cores, actors, expected, monkeypatch):
    """One that waits for room is in nobody's way, and one process more than cores is no reason to warn."""
    machine = dataclasses.replace(detection.detect(), usable_cores=cores, allowed_cores=cores)
    monkeypatch.setattr(detection, "detect", lambda: machine)
    data = {"algorithm": "impala", "mode": "parallel", "impala": {"num_actors": actors}}
    config = fill_in(Config.model_validate(data))
    assert (config.parallel.num_workers, config.impala.num_learners) == expected
    is_warned = any("Warning" in line for line in planning.plan(config).lines(config))
    assert is_warned == (sum(expected) > cores + 1)
    assert config.unrolls_per_step == (12 if cores == 16 else 8), "what is learned does not depend on sharing"


def test_learners_of_all_machines_get_an_environment_each(monkeypatch):
    machine = dataclasses.replace(detection.detect(), usable_cores=2)
    monkeypatch.setattr(detection, "detect", lambda: machine)
    data = {"algorithm": "impala", "mode": "distributed", "cluster": {"num_workers": 2}}
    learners = [
        fill_in(Config.model_validate(data | {"env": {"num_envs": num_envs}})).impala.num_learners
        for num_envs in (3, 4)
    ]
    assert learners == [1, 2]


def test_actors_may_compute_in_another_precision():
    def precision(learning, acting):
        data = {"algorithm": "impala", "hardware": {"precision": learning}, "impala": {"inference_precision": acting}}
        config = Config.model_validate(data)
        return planning.acting(config, planning.plan(config))[0]

    assert precision("float32", "bfloat16") == torch.bfloat16
    assert precision("float32", "same") == torch.float32
    assert precision("bfloat16", "same") == torch.bfloat16


def test_replay_makes_learners_need_more_cores():
    assert split(Costs(lambda actors: 1.0, 1.0), 12, unrolls=10_000, fresh=0.5) == (4, 8)


# Replay


def test_replay_keeps_the_newest_in_a_file_without_a_name(tmp_path):
    layout = unroll_layout(TASK, 4)
    replay = ReplayFile(tmp_path, 5, layout)
    assert list(tmp_path.iterdir()) == []
    fields = {name: torch.zeros(8, *shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
    for row in range(8):
        fields["actions"][row] = row
        fields["observations"][row] = row
        replay.add(fields, row)
        assert len(replay) == min(5, row + 1)
    unrolls = gather(replay.sample(500, np.random.default_rng(0)))
    assert sorted(set(unrolls.actions[0].tolist())) == [3, 4, 5, 6, 7], "the first three made room"
    for frames, number in zip(unrolls.observations, unrolls.actions[0].tolist(), strict=True):
        assert float(frames.min()) == float(frames.max()) == number


def test_a_replay_too_large_for_the_disk_is_refused(tmp_path):
    size = ("--set", "impala.replay_fraction=0.5", "--set", "impala.replay_size=100000000000")
    done = train(tmp_path / "run", *size)
    assert done.returncode == 2
    assert "use a smaller impala.replay_size" in done.stderr
    assert "Traceback" not in done.stderr


class FakeRun:
    """As much of a run as the recorder needs."""

    def __init__(self):
        self.clock, self.asynchrony, self.worker_cpu_seconds = PhaseClock(), Asynchrony(), 0.0

    def record(self, steps, episodes, losses, asynchrony, at):
        self.asynchrony.add(asynchrony)


@pytest.mark.parametrize("end", ["complete", "save"])
def test_episodes_of_other_machines_that_come_late_count(end):
    """Machines in step with each other: the head tells of an update at once, others of their episodes later."""
    recorded, seconds = [], itertools.count(1)
    run = FakeRun()

    def record(steps, episodes, losses, asynchrony, at):
        recorded.append((steps, list(episodes), asynchrony["async/policy_lag"], run.worker_cpu_seconds))

    def times():
        row = [0.0] * (len(PHASES) + 2)
        row[-1] = float(next(seconds))
        return ProcessTimes([row, [0.0] * len(row)], num_learners=1)

    run.record = record
    run.save = lambda state: recorded.append("saved")
    here = SimpleNamespace(seat=SimpleNamespace(num_nodes=2), is_on_its_own=False)
    updates = MachinesUpdates(run, here, times)
    reports = Reports(run, updates)
    first, second = (UpdateMade(64, {}, at=1.0, asynchrony={"async/policy_lag": lag}) for lag in (1.0, 2.0))
    reports.hear(0, first)
    reports.hear(1, EpisodesEnded([(1.0, 9)]))
    reports.hear(0, second)
    assert recorded == [(64, [(1.0, 9)], 1.0, 1.0)], "with the lag and the times of its own update"
    reports.hear(1, EpisodesEnded([(0.0, 8)]))
    if end == "save":
        reports.hear(0, StateToSave(checkpoint.pack({})))
    updates.complete()
    assert recorded[1:] == [(64, [(0.0, 8)], 2.0, 2.0), *(["saved"] if end == "save" else [])]


def test_idle_shares_are_of_the_whole_run():
    """Seconds waited over seconds lived, those before a resume included: no mean of shares since the start."""
    waiting, report = PHASES.index("waiting"), UpdateMade(1, {}, at=1.0)

    def table(waited, lived):
        row = torch.zeros(1, len(PHASES) + 2, dtype=torch.float64)
        row[0, waiting], row[0, -2] = waited, lived
        return row

    run = FakeRun()
    recorder = UpdateRecorder(run)
    for actor, learner, lived in ((9, 1, 10), (9, 31, 100), (10, 60, 200)):
        recorder.record(report, table(learner, lived), table(actor, lived), 0)
    assert run.asynchrony.summary()["actor_idle"] == pytest.approx(0.05)
    assert run.asynchrony.summary()["learner_idle"] == pytest.approx(0.3)
    resumed = FakeRun()
    resumed.asynchrony.load_state_dict(run.asynchrony.state_dict())
    UpdateRecorder(resumed).record(report, table(40, 200), table(90, 200), 0)
    assert resumed.asynchrony.summary()["actor_idle"] == pytest.approx(100 / 400)
    assert resumed.asynchrony.summary()["learner_idle"] == pytest.approx(100 / 400)
    older = Asynchrony()
    older.load_state_dict({"sums": {}, "counts": {}})
    assert older.waits == {}


# Whole runs


def test_a_run_its_metrics_and_its_resumption(tmp_path):
    output = tmp_path / "run"
    done = train(output, "--set", "impala.num_learners=2", "--set", "training.save_interval=4",
                 "--set", "impala.replay_fraction=0.5", "--set", "impala.replay_size=20")  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in ("IMPALA Parallel Training", "Actor 1 started with 6 environments", "Learner 1 started",
                 "Actors: 2, Learners: 2", "gradient steps on average", "Idle: actors"):  # fmt: skip
        assert text in done.stdout, text
    first, lines = summary(output), read_metrics(output, LABEL)
    assert (first["num_workers"], first["num_learners"], first["num_envs"]) == (2, 2, 12)
    assert sum(first["phase_shares"].values()) == pytest.approx(1.0)
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))
    names = {"async/policy_lag", "async/policy_lag_max", "async/unroll_age", "async/slots_in_use",
             "async/learner_idle", "async/actor_idle", "system/actor_restarts"}  # fmt: skip
    assert names <= lines[-1].keys()
    assert {name.rpartition("/")[2] for name in names} == first["asynchrony"].keys()
    assert 0 < first["asynchrony"]["policy_lag"] <= first["asynchrony"]["policy_lag_max"] < 40
    assert 0 < first["asynchrony"]["slots_in_use"] <= 1
    events = EventAccumulator(str(output / "logs" / LABEL))
    events.Reload()
    assert names <= set(events.Tags()["scalars"])
    # Half of each batch is old: an update of 12 unrolls of 16 steps has 6 new ones.
    assert np.diff([line["step"] for line in lines]).mean() == pytest.approx(6 * 16, rel=0.15)
    assert {path.name for path in output.iterdir()} == {
        ".lock", "benchmark_metrics.json", "checkpoints", "config.yaml", "logs", "metrics.json", "training_summary.json"
    }  # fmt: skip
    before = checkpoint.load(output / "checkpoints" / "impala_parallel_final.pt")
    done = rlcb("train", *TINY, "--resume", "--total-timesteps", 5000, "--output-dir", output)
    assert done.returncode == 0, done.stderr
    second = summary(output)
    assert second["num_learners"] == 2, "as the run's own config says"
    assert second["initial_reward"] == first["initial_reward"]
    assert second["duration_hours"] > first["duration_hours"]
    assert [line["update"] for line in read_metrics(output, LABEL)] == list(range(1, second["total_updates"] + 1))
    after = checkpoint.load(output / "checkpoints" / "impala_parallel_final.pt")
    assert after["algorithm"]["optimizer"]["steps"] > before["algorithm"]["optimizer"]["steps"]
    for role in ("actor", "learner"):  # waited and lived since the start
        old, new = (state["progress"]["asynchrony"]["waits"][role] for state in (before, after))
        assert old[0] <= new[0] < new[1] > old[1] > 0
        assert second["asynchrony"][f"{role}_idle"] == pytest.approx(new[0] / new[1])
    assert after["progress"]["peak_worker_memory"] >= before["progress"]["peak_worker_memory"] > 0
    assert after["algorithm"]["reward_normalizer"]["count"] > before["algorithm"]["reward_normalizer"]["count"]


def test_an_actor_that_dies_is_replaced_up_to_a_limit(tmp_path):
    output = tmp_path / "run"
    args = ("--total-timesteps", 100_000_000, "--output-dir", output, "--set", "impala.max_actor_restarts=1")
    with running(*TINY, *args) as process:
        wait_for_updates(output, LABEL, 3, process)
        learner, first, _ = sorted(workers_of(process), key=lambda worker: worker.create_time())
        first.kill()
        text = wait_for_line("Actor 0 started again with 6 environments", process)
        assert "Actor 0 was killed by SIGKILL" in text
        assert "Another takes its place" in text
        wait_for_updates(output, LABEL, len(read_metrics(output, LABEL)) + 50, process)
        everyone = workers_of(process)
        assert learner in everyone, "the others went on"
        newest = max(everyone, key=lambda worker: worker.create_time())
        newest.kill()
        text, _ = process.communicate(timeout=20)
        assert process.returncode == 1
    assert "After 1 restarts (impala.max_actor_restarts) Actor 0 was killed by SIGKILL" in text
    assert "Traceback" not in text
    assert_gone(everyone)
    assert summary(output)["asynchrony"]["actor_restarts"] == 1


def test_an_actor_that_cannot_be_replaced_ends_the_run(tmp_path):
    """The user has no more files to open: no worker is left behind, and nobody waits for one."""
    args = ("--total-timesteps", 100_000_000, "--output-dir", tmp_path / "run")
    args += ("--set", "training.save_interval=100000", "--set", "logging.tensorboard=false")
    with running(*TINY, *args) as process:
        wait_for_updates(tmp_path / "run", LABEL, 3, process)
        everyone = sorted(workers_of(process), key=lambda worker: worker.create_time())
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (8, most))
        everyone[1].kill()
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 1
    assert "Worker 1 could not be started (" in text, text
    assert "ulimit -n" in text
    assert "Traceback" not in text
    assert_gone(everyone)


def test_a_learner_that_dies_ends_the_run(tmp_path):
    output = tmp_path / "run"
    args = ("--total-timesteps", 100_000_000, "--output-dir", output, "--set", "training.save_interval=2")
    with running(*TINY, *args, "--set", "impala.num_learners=2") as process:
        wait_for_updates(output, LABEL, 5, process)
        everyone = sorted(workers_of(process), key=lambda worker: worker.create_time())
        everyone[1].kill()
        text, _ = process.communicate(timeout=10)
        assert process.returncode == 1
    assert "Learner 1 was killed by SIGKILL" in text
    assert "the last checkpoint is intact" in text
    assert_gone(everyone)
    newest = max((output / "checkpoints").glob("*.pt"), key=lambda f: f.stat().st_mtime)
    assert checkpoint.load(newest)["progress"]["updates"] >= 2


def test_a_signal_ends_it_in_good_order(tmp_path):
    output = tmp_path / "run"
    with running(*TINY, "--total-timesteps", 100_000_000, "--output-dir", output) as process:
        wait_for_updates(output, LABEL, 5, process)
        everyone = workers_of(process)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGINT, text
    assert_gone(everyone)
    assert summary(output)["state"] == "interrupted"
    assert list((output / "checkpoints").glob("impala_parallel_step_*.pt"))


def test_procgen_with_bfloat16_actors(tmp_path):
    """The parameters hardly change: actors and learners differ by their precision alone, however old an unroll is."""
    done = rlcb(
        "train", "--algorithm", "impala", "--mode", "parallel", "--env", "starpilot", "--num-workers", 2,
        "--num-envs", 7, "--set", "training.n_steps=10", "--set", "model.channels=[4, 8]", "--batch-size", 40,
        "--set", "hardware.precision=float32", "--set", "impala.inference_precision=bfloat16",
        "--set", "hardware.micro_batch=8", "--learning-rate", 1e-7, "--total-timesteps", 400, "--output-dir", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path)["total_timesteps"] >= 400
    assert read_metrics(tmp_path, LABEL)[-1]["losses/approx_kl"] < 0.001


def test_duration_and_nan(tmp_path):
    output = tmp_path / "run"
    done = train(output, "--duration", 2 / 3600, timesteps=100_000_000)
    assert done.returncode == 0, done.stderr
    assert summary(output)["duration_hours"] * 3600 == pytest.approx(2, abs=1)
    started_with(output, "training.learning_rate", 1e38)
    done = train(output, "--resume", "--learning-rate", "1e38", "--duration", 1, timesteps=100_000_000)
    assert done.returncode == 1
    assert "became NaN or infinite" in done.stderr
    assert "Traceback" not in done.stderr


def test_several_passes_over_each_batch_count_their_steps_once(tmp_path):
    """Every episode of Catch takes nine steps: so many steps were taken as the episodes say, whatever was learned."""
    done = train(tmp_path, "--env", "Catch-v0", "--set", "impala.num_learners=2", "--set", "impala.passes=3",
                 "--total-timesteps", 9000)  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, lines = summary(tmp_path), read_metrics(tmp_path, LABEL)
    in_hand = 12 * 16 * 4  # an unroll of each environment in every page and one in the making
    assert first["total_timesteps"] == pytest.approx(9 * first["num_episodes"], abs=in_hand)
    state = checkpoint.load(tmp_path / "checkpoints" / "impala_parallel_final.pt")
    new_steps = np.diff([line["step"] for line in lines]).mean()  # an update: two batches, three passes each
    steps = int(state["algorithm"]["optimizer"]["steps"])
    assert steps == pytest.approx(6 * first["total_timesteps"] / new_steps, rel=0.05)
