"""A3C with real processes: one worker is A2C, several go on without waiting, and none is left behind."""

import copy
import json
import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers.commands import read_metrics, rlcb, started_with
from helpers.processes import assert_gone, running, wait_for_updates, without_times, workers_of

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.hogwild import hogwild, hogwild_worker
from rl_cluster_benchmark.execution.hogwild.hogwild_worker import SumSinceLastTime, WithoutWaiting
from rl_cluster_benchmark.execution.machines.machine_alone import MachineAlone
from rl_cluster_benchmark.execution.messages import StateToSave, UpdateMade
from rl_cluster_benchmark.learning.learner import OPTIMIZERS, Alone, Learner
from rl_cluster_benchmark.machine import planning
from rl_cluster_benchmark.nets.models import make_model
from rl_cluster_benchmark.processes.shared_memory import SharedTensors
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.metrics import Asynchrony
from rl_cluster_benchmark.training import executions

LABEL = "A3C_Parallel"
TINY = ("--env", "Catch-v0", "--set", "training.n_steps=16", "--set", "parallel.pin=never", "--num-threads", 1,
        "--set", "training.log_interval=1")  # fmt: skip
RUN = ("--algorithm", "a3c", "--mode", "parallel", *TINY, "--num-workers", 2, "--num-envs", 16)


def train(output, *args, timesteps=3000):
    return rlcb("train", *RUN, "--total-timesteps", timesteps, "--output-dir", output, *args)


def summary(output):
    return json.loads((output / "training_summary.json").read_text())


def test_one_worker_is_a2c_number_for_number(tmp_path):
    states = {}
    runs = {"a2c": ("a2c", "sequential"), "hogwild": ("a3c", "parallel"), "a3c": ("a3c", "sequential")}
    common = ("--num-envs", 8, "--total-timesteps", 3000, "--set", "training.anneal_lr=true")
    for name, (algorithm, mode) in runs.items():
        done = rlcb(
            "train", "--config", "a2c_sequential", "--algorithm", algorithm, "--mode", mode, *TINY, *common,
            "--num-workers", 1, "--output-dir", tmp_path / name,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        states[name] = checkpoint.load(tmp_path / name / "checkpoints" / f"{algorithm}_{mode}_final.pt")
    reference = states.pop("a2c")
    assert reference["progress"]["updates"] > 20
    for name, state in states.items():
        assert state["progress"]["steps"] == reference["progress"]["steps"], name
        for key, tensor in reference["model"].items():
            torch.testing.assert_close(state["model"][key], tensor, rtol=0, atol=0, msg=f"{name}: {key}")
        assert state["algorithm"]["reward_normalizer"] == reference["algorithm"]["reward_normalizer"], name
        assert state["algorithm"]["optimizer"]["steps"] == reference["algorithm"]["optimizer"]["steps"], name
    curves = [without_times(read_metrics(tmp_path / "a2c", "A2C_Sequential"))]
    curves.append(without_times(read_metrics(tmp_path / "hogwild", LABEL)))
    for line in curves[1]:
        assert line.pop("async/policy_lag") == line.pop("async/policy_lag_max") == 0
    assert curves[0] == curves[1]


def test_output_summary_and_resume(tmp_path):
    output = tmp_path / "run"
    done = train(output, "--set", "training.save_interval=4")
    assert done.returncode == 0, done.stderr
    for text in ("A3C Parallel Training", "Worker 1 started with 8 environments", "Policy Lag:", "without locks"):
        assert text in done.stdout, text
    first = summary(output)
    assert first["total_timesteps"] >= 3000
    assert first["asynchrony"]["policy_lag_max"] >= first["asynchrony"]["policy_lag"] >= 0
    lines = read_metrics(output, LABEL)
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1]["step"] == first["total_timesteps"], "every worker's steps count, those of the last moment too"
    assert list((output / "checkpoints").glob("a3c_parallel_step_*.pt"))
    state = checkpoint.load(output / "checkpoints" / "a3c_parallel_final.pt")
    of_workers = 2 * state["progress"]["updates"]  # of which the count may lose one to a race now and then
    assert of_workers * 0.8 <= state["algorithm"]["optimizer"]["steps"] <= of_workers
    done = train(output, "--resume", timesteps=6000)
    assert done.returncode == 0, done.stderr
    second = summary(output)
    assert second["initial_reward"] == first["initial_reward"]
    assert second["total_updates"] > first["total_updates"]
    lines = read_metrics(output, LABEL)
    assert [line["update"] for line in lines] == list(range(1, second["total_updates"] + 1))
    before, after = (first[key] for key in ("duration_hours", "num_episodes")), second
    assert all(value < after[key] for value, key in zip(before, ("duration_hours", "num_episodes"), strict=True))


def test_nothing_is_trained_when_time_is_over(tmp_path):
    """Also if the end of the run was not written down: its summary is lost."""
    output = tmp_path / "run"
    time_limit = ("--duration", 1 / 3600)
    assert train(output, *time_limit, timesteps=100_000_000).returncode == 0
    first = summary(output)
    (output / "training_summary.json").unlink()
    done = train(output, *time_limit, "--resume", timesteps=100_000_000)
    assert done.returncode == 0, done.stderr
    assert summary(output)["total_updates"] == first["total_updates"]


def test_a_resumed_run_of_several_machines_draws_no_random_number_again():
    """An update of the run is one of each worker on average: one of them may have made them all."""
    shared = SharedTensors(
        hogwild_worker.layout(Config.model_validate({"algorithm": "a3c", "env": {"name": "Catch-v0"}}), 1)
    )
    progress = {"updates": 100, "steps": 0, "elapsed": 0.0}
    course = hogwild_worker.HogwildCourse(0, None, Config(), shared, progress, saves=True, total_workers=3)
    assert course.updates >= 3 * 100


def test_steps_before_a_checkpoint_and_of_a_run_that_fails_count(tmp_path, monkeypatch):
    """Of three workers that make up an update, two have reported when one saves, and one when another fails."""
    recorded = []
    report = UpdateMade(64, {"policy_loss": 0.5}, at=1.0)

    def supervise(supervisor, pool, hear):
        hear(0, report)
        hear(0, report)
        hear(0, StateToSave(checkpoint.pack({})))
        hear(0, report)
        raise TrainingFailedError("Worker 1 was killed")

    monkeypatch.setattr(hogwild.MachineSupervisor, "run", supervise)
    args = ["train", "--algorithm", "a3c", "--mode", "parallel", *TINY, "--num-workers", 3, "--output-dir", tmp_path]
    config, plan = planning.resolve(main.config_from(main.build_parser().parse_args(list(map(str, args)))))
    run = SimpleNamespace(
        config=config, plan=plan, directory=SimpleNamespace(root=tmp_path), resumed_path=None,
        progress_state=lambda: {"steps": 0}, clock=PhaseClock(),
        asynchrony=Asynchrony(), start=lambda: None,
        record=lambda steps, *rest: recorded.append(steps), save=lambda state: recorded.append("saved"),
    )  # fmt: skip
    with pytest.raises(TrainingFailedError, match="Worker 1"):
        executions.train(run, MachineAlone(plan, Signals()))
    assert recorded == [128, "saved", 64]


def test_a_signal_ends_it_in_good_order(tmp_path):
    output = tmp_path / "run"
    with running(*RUN, "--total-timesteps", 100_000_000, "--output-dir", output) as process:
        wait_for_updates(output, LABEL, 5, process)
        workers = workers_of(process)
        assert len(workers) == 2
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM, text
    assert_gone(workers)
    assert summary(output)["state"] == "interrupted"


def test_a_killed_worker_ends_the_run(tmp_path):
    output = tmp_path / "run"
    args = ("--total-timesteps", 100_000_000, "--set", "training.save_interval=2", "--output-dir", output)
    with running(*RUN, *args) as process:
        wait_for_updates(output, LABEL, 5, process)
        deadline = time.monotonic() + 60
        while not any((output / "checkpoints").glob("*.pt")):  # the first one is written beside the updates
            assert time.monotonic() < deadline
            time.sleep(0.02)
        workers = workers_of(process)
        workers[1].kill()
        text, _ = process.communicate(timeout=10)
        assert process.returncode == 1
    assert "Worker 1 was killed by SIGKILL" in text
    assert "Traceback" not in text
    assert_gone(workers)
    newest = max((output / "checkpoints").glob("*.pt"), key=lambda f: f.stat().st_mtime)
    assert checkpoint.load(newest)["progress"]["updates"] >= 2


def test_nan_stops_it(tmp_path):
    assert train(tmp_path / "run", timesteps=1000).returncode == 0
    started_with(tmp_path / "run", "training.learning_rate", 1e38)
    done = train(tmp_path / "run", "--resume", "--learning-rate", "1e38", timesteps=5000)
    assert done.returncode == 1
    assert "became NaN or infinite" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
def test_shared_parameters_and_statistics_change_no_step(optimizer):
    """Two learners that take turns on shared memory do what one does alone."""
    config = Config.model_validate({"training": {"optimizer": optimizer}})
    torch.manual_seed(0)
    model = make_model(config.model, (4,), 3, config.hardware, torch.float32)

    def learner(reduce):
        make = partial(OPTIMIZERS[optimizer], eps=1e-5)
        return Learner(copy.deepcopy(model), optimizer=make, max_grad_norm=0.5, num_stats=0, reduce=reduce)

    alone = learner(Alone())
    size, moments = len(alone.flat), OPTIMIZERS[optimizer].MOMENTS
    layout = {"parameters": ((size,), torch.float32), "optimizer_steps": ((1,), torch.float32)}
    layout |= {"returns": ((2, 8), torch.float64), "elsewhere": ((5,), torch.float64)}
    shared = SharedTensors(layout | {f"moment_{name}": ((size,), torch.float32) for name in moments})
    workers = [learner(WithoutWaiting(shared, rank)) for rank in range(2)]
    shared["parameters"].copy_(alone.flat)
    for turn in range(6):
        gradient = torch.randn(size)
        for one in (alone, workers[turn % 2]):
            one.grad.copy_(gradient)
            one.step(1e-2)
        torch.testing.assert_close(shared["parameters"], alone.flat, rtol=0, atol=0)
    assert alone.state_dict()["steps"] == workers[0].state_dict()["steps"] == 6.0
    for name in moments:
        torch.testing.assert_close(shared[f"moment_{name}"], alone.optimizer.moments[name], rtol=0, atol=0)


def test_a_sum_that_nobody_waits_for():
    """Everything that anyone adds reaches everyone once."""
    table = torch.zeros(3, 8, dtype=torch.float64)
    elsewhere = torch.zeros(3, dtype=torch.float64)
    workers = [SumSinceLastTime(table, rank, elsewhere) for rank in range(3)]
    totals = [torch.zeros(2, dtype=torch.float64) for _ in range(3)]
    given = torch.zeros(2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        rank = int(torch.randint(3, (1,), generator=generator))
        amount = torch.rand(2, generator=generator).double()
        given += amount
        totals[rank] += workers[rank](amount.clone())
        elsewhere[:2] += amount / 2  # by workers of other machines
        given += amount / 2
    for rank in range(3):
        totals[rank] += workers[rank](torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(totals[rank], given)
