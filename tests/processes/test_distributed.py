"""Distributed mode with real processes on this machine, over the loopback interface: the same maths, the same end."""

import fcntl
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers.commands import ROOT, environment
from helpers.forked import Command
from helpers.machines import (
    FOREVER,
    TINY,
    Nodes,
    assert_gone,
    metrics,
    sequential_state,
    summary,
    train,
    wait_for_updates,
)
from helpers.processes import workers_of

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.cluster.membership import Membership
from rl_cluster_benchmark.cluster.network import free_port
from rl_cluster_benchmark.cluster.rendezvous import Cluster
from rl_cluster_benchmark.cluster.store import STORE_TIMEOUT, client
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.atomic_files import remove_leftovers
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.execution.in_step.local_steps import LocalSteps
from rl_cluster_benchmark.execution.loop import Worker
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.learning.losses import left_out as counts_left_out
from rl_cluster_benchmark.machine import planning
from rl_cluster_benchmark.processes import watchdog
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.training import node


@pytest.fixture
def nodes():
    started = Nodes()
    yield started
    started.kill()


@pytest.mark.parametrize(("algorithm", "shapes"), [("ppo", [(2, 2), (1, 4)]), ("a2c", [(2, 1)])])
def test_several_machines_do_the_same_maths_as_one_process(algorithm, shapes, tmp_path):
    """(machines, workers on each): the parameters of sequential mode after several updates, to rounding.

    Several workers on each of several machines also share work.
    """
    reference = sequential_state(tmp_path / "sequential", algorithm)
    assert reference["progress"]["updates"] >= 5
    for nodes, workers in shapes:
        name = f"{nodes}x{workers}"
        balance = ("--set", f"parallel.balance={0.5 if nodes > 1 else 0}")
        train(tmp_path / name, *balance, nodes=nodes, workers=workers, algorithm=algorithm)
        state = checkpoint.load(tmp_path / name / "checkpoints" / f"{algorithm}_distributed_final.pt")
        assert state["progress"]["steps"] == reference["progress"]["steps"], name
        for key, tensor in reference["model"].items():
            torch.testing.assert_close(state["model"][key], tensor, atol=2e-5, rtol=1e-3, msg=f"{name}: {key}")
        scale = state["algorithm"]["reward_normalizer"]
        assert scale == pytest.approx(reference["algorithm"]["reward_normalizer"]), name
        assert state["progress"]["episodes"] == reference["progress"]["episodes"], f"{name}: as they ended"
        assert (summary(tmp_path / name)["num_workers"], len(summary(tmp_path / name)["nodes"])) == (
            4 if algorithm == "ppo" else 2,
            nodes,
        )


@pytest.mark.parametrize("victim", ["worker", "head", pytest.param("silent node", marks=pytest.mark.cluster)])
def test_the_loss_of_a_part_ends_all_with_the_reason(victim, nodes, tmp_path):
    output = tmp_path / "run"
    head, other = nodes.start(output, "--set", "training.save_interval=2", timesteps=FOREVER)
    wait_for_updates(output, 4, nodes)
    workers = nodes.workers()
    assert len(workers) == 2
    lost_at = time.monotonic()
    if victim == "worker":
        workers_of(other)[0].kill()
        survivors, reason = nodes.ends(timeout=60), "Worker 0 was killed by SIGKILL"
        assert survivors[1][0] == 1
        assert "Node 1 (" in survivors[0][1]
    elif victim == "head":
        head.kill()
        survivors, reason = nodes.ends(timeout=60)[1:], "Lost contact with Node 0"
    else:
        for process in (psutil.Process(other.pid), *psutil.Process(other.pid).children(recursive=True)):
            process.suspend()
        text, _ = head.communicate(timeout=60)
        survivors, reason = [(head.returncode, text)], "Node 1 ("
        other.kill()
    assert time.monotonic() - lost_at < 30, "cluster.timeout is 10 s"
    for status, text in survivors:
        assert status == 1, text
        assert reason in text, text
        assert "Traceback" not in text
    assert_gone(workers)
    if victim != "head":
        assert summary(output)["state"] == "failed"
        assert reason in summary(output)["reason"]
    assert list((output / "checkpoints").glob("*.pt"))


def test_the_head_hears_how_much_memory_the_others_use():
    membership = Membership(lambda timeout: dist.HashStore(), 0, ["head", "other"], timeout=5.0)
    membership._store.set("beat/1", "1 1000")
    deadline = time.monotonic() + 5
    while membership.memory_elsewhere() == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert membership.memory_elsewhere() == 1000
    membership._leave(lambda: None, 1.0)


def test_a_machine_that_has_left_is_not_missed():
    """The head may write for longer than cluster.timeout when the others have come to their end."""
    membership = Membership(lambda timeout: dist.HashStore(), 0, ["head", "second", "third"], timeout=2.0)
    for other in (1, 2):
        membership._store.set(f"beat/{other}", "1 1000")
    membership._store.set("left/1", "")
    time.sleep(4.5)
    with pytest.raises(TrainingFailedError, match="third has not been heard of"):
        membership.check()
    membership._store.set("left/2", "")
    time.sleep(2.5)
    membership.check()
    membership._leave(lambda: None, 1.0)


def test_a_machine_that_was_stopped_itself_misses_nobody(monkeypatch):
    """Whoever stops all machines lets them go on; one that stays silent from then on is missed."""
    monkeypatch.setattr(watchdog, "OWN_PAUSE", 1.0)
    membership = Membership(lambda timeout: dist.HashStore(), 0, ["head", "other"], timeout=2.0)
    membership._store.set("beat/1", "1 1000")
    membership.check()
    time.sleep(3)
    membership.check()

    def look_for(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            membership.check()
            time.sleep(0.1)

    with pytest.raises(TrainingFailedError, match="other has not been heard of"):
        look_for(3)
    membership._leave(lambda: None, 1.0)


STORE = """
import sys, time
from rl_cluster_benchmark.cluster.store import _serve
store = _serve("127.0.0.1", int(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("question", ["read", "publish", "agree_on_work"])
def test_a_head_that_is_gone_is_told_as_that(question, tmp_path):
    """Between the meeting and the work, when nobody listens to its heart yet."""
    address = ("127.0.0.1", free_port())
    head = subprocess.Popen([sys.executable, "-c", STORE, str(address[1])], env=environment(), stdout=subprocess.PIPE)
    try:
        assert head.stdout.readline() == b"ready\n"
        silent = SimpleNamespace(check=lambda: None)
        store = client(*address, STORE_TIMEOUT)
        cluster = Cluster(1, [], store, address, "", silent, None, 60.0, Signals())
        head.kill()
        head.wait()
        ask = {
            "read": lambda: cluster.read("work"),
            "publish": lambda: [cluster.publish("ready/1", True) for _ in range(100)],
            "agree_on_work": lambda: [node.agree_on_work(cluster, Config(), tmp_path, None, {}) for _ in range(100)],
        }[question]
        with pytest.raises(TrainingFailedError, match="The head's store no longer answers"):
            ask()
    finally:
        head.kill()
        head.stdout.close()


def test_a_signal_to_one_machine_stops_all_and_the_run_goes_on_with_fewer(nodes, tmp_path):
    output = tmp_path / "run"
    _, other = nodes.start(output, timesteps=FOREVER, workers=2)
    wait_for_updates(output, 3, nodes)
    os.kill(other.pid, signal.SIGUSR1)
    for status, text in nodes.ends(timeout=60):
        assert status == 128 + signal.SIGUSR1, text
    assert summary(output)["state"] == "interrupted"
    first = summary(output)
    train(output, "--resume", nodes=1, workers=1, timesteps=first["total_timesteps"] + 1000)
    second = summary(output)
    assert second["num_envs"] == first["num_envs"] == 16
    lines = metrics(output)
    assert [line["update"] for line in lines] == list(range(1, second["total_updates"] + 1))
    assert lines[first["total_updates"]]["step"] > first["total_timesteps"], "no step is counted twice"


def test_a_signal_is_obeyed_while_a_machine_greets_a_head_that_does_not_answer(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        call = ["train", "--mode", "distributed", *TINY, "--num-nodes", 2, "--node-rank", 1, "--output-dir", tmp_path]
        call += ["--master-addr", "127.0.0.1", "--master-port", silent.getsockname()[1]]
        node = Command(call, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        silent.settimeout(60)
        look, greeting = silent.accept()[0], silent.accept()[0]  # is there anybody? and the greeting, never answered
        node.send_signal(signal.SIGTERM)
        text = node.communicate(timeout=20)[0].decode()
        look.close()
        greeting.close()
    assert node.returncode == 128 + signal.SIGTERM, text


def test_machines_must_agree(nodes, tmp_path):
    nodes.start(tmp_path / "run", each=lambda rank: ("--seed", rank))
    for status, text in nodes.ends():
        assert status == 2, text
        assert "was started with env.seed = 1, the head" in text
        assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


def test_what_a_killed_head_leaves_for_others_to_see_is_removed_by_the_next(tmp_path):
    left = []

    def publish(key, value):
        left.append(Path(value["token"]))

    cluster = SimpleNamespace(publish=publish, nodes=[None], join_timeout=1.0, store=None)
    node.agree_on_work(cluster, Config(), tmp_path, None, {})
    left[0].write_text(left[0].name)  # as if it had been killed before it could remove it
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_others_do_not_see_is_refused(nodes, tmp_path, monkeypatch):
    monkeypatch.setattr(node, "SECONDS_TO_SEE_A_FILE", 0.3)
    with pytest.raises(UserError, match="does not see the run directory"):
        node._check_sees(tmp_path / ".seen-by-all", "Node 1 (b)", "a")
    (tmp_path / ".seen-by-all").write_text(".seen-by-all")
    node._check_sees(tmp_path / ".seen-by-all", "Node 1 (b)", "a")


def test_a_head_that_comes_back_late_writes_no_more(tmp_path):
    directory = RunDirectory(tmp_path, tmp_path / "checkpoints", tmp_path / "logs", "ppo_distributed")
    late = directory.claim(may_hold_a_run=True)
    late.check()
    with pytest.raises(UserError, match="is in use by another run"):
        directory.claim(may_hold_a_run=True, patience=0.3)
    for descriptor in late.descriptors:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # as when its machine is cut off from the filesystem
    now = directory.claim(may_hold_a_run=True)
    now.check()
    with pytest.raises(TrainingFailedError, match="taken over"):
        late.check()
    for claim in (late, now):
        claim.release()


def alone(config, env_ids):
    plan = planning.plan(config)
    return Worker.build(
        config, plan, env_ids=env_ids, reduce=Alone(), clock=PhaseClock(), incarnation=0, checkpoint=None
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_local_sgd_is_each_machine_by_itself_and_then_their_mean(tmp_path, workers):
    """3 updates with an average every 2, and one at the end, against the definition; two workers share parameters."""
    args = ["--set", "cluster.sync=local_sgd", "--set", "cluster.sync_every=2"]
    train(tmp_path / "run", *args, "--set", "parallel.balance=0.5", timesteps=1300, workers=workers)
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "ppo_distributed_final.pt")
    assert state["progress"]["updates"] == 3
    words = ["train", "--mode", "distributed", *TINY, "--num-nodes", 2, "--workers-per-node", 1, *args]
    config = main.config_from(main.build_parser().parse_args(list(map(str, words))))
    machines = [alone(config, range(start, start + 8)) for start in (0, 8)]
    for update in range(3):
        for machine in machines:
            rollout = machine.collector.collect(update, lambda: False)
            machine.algorithm.update(rollout, index=update, progress=0.0, interrupted=lambda: False)
        if update in (1, 2):
            vectors = [machine.algorithm.on_policy.learner.vectors() for machine in machines]
            for first, second in zip(*vectors, strict=True):
                first.copy_((first + second) / 2)
                second.copy_(first)
            scales = [machine.algorithm.on_policy.normalize_rewards.scale for machine in machines]
            for name in ("mean", "variance", "count"):
                mean = sum(getattr(scale, name) for scale in scales) / 2
                for scale in scales:
                    setattr(scale, name, mean)
    for key, tensor in machines[0].state()["model"].items():
        torch.testing.assert_close(state["model"][key], tensor, atol=2e-5, rtol=1e-3, msg=key)
    assert state["algorithm"]["reward_normalizer"] == pytest.approx(scales[0].state_dict())
    for key, moment in machines[0].state()["algorithm"]["optimizer"]["moments"]["exp_avg"].items():
        torch.testing.assert_close(
            state["algorithm"]["optimizer"]["moments"]["exp_avg"][key], moment, atol=1e-5, rtol=1e-2
        )


class Sum:
    """As much of a reducer as losses need."""

    def __init__(self, add_up, num_workers):
        self.add_up, self.num_workers = add_up, num_workers

    def __call__(self, mine):
        return self.add_up(mine)


def local_steps(add_up, workers_here):
    return LocalSteps(None, Sum(add_up, workers_here), None, every=9, total_workers=2 * workers_here, updates=0)


@pytest.mark.parametrize(
    ("here", "there", "loss", "skipped"),
    [((0.1, 0), (0.3, 0), 0.2, 0), ((0.1, 1), (0.3, 0), 0.2, 1), ((math.nan, 4), (0.3, 0), 0.3, 4),
     ((math.nan, 4), (math.nan, 3), math.nan, 7)],
)  # fmt: skip
def test_machines_that_skip_updates_by_themselves_are_counted_and_hide_no_losses(here, there, loss, skipped):
    """Two machines of two workers each, which all say the same of their machine."""
    theirs = torch.tensor([there[0], there[1] / 2], dtype=torch.float64)
    others = torch.cat([theirs.nan_to_num(0.0), theirs.isfinite().double()])
    here_steps = local_steps(lambda mine: 2 * mine + 2 * others, workers_here=2)
    found = here_steps.of_all_machines({"policy_loss": here[0], "skipped_updates": float(here[1])})
    assert found == {"policy_loss": pytest.approx(loss, nan_ok=True), "skipped_updates": skipped}


def test_experience_that_all_machines_leave_out_is_counted_once():
    """The loop has summed the counts over all machines before."""
    left_out = counts_left_out((6, 0), "skip")
    here_steps = local_steps(lambda mine: 2 * mine, workers_here=1)
    losses = here_steps.of_all_machines({"policy_loss": math.nan} | left_out)
    assert {name: losses[name] for name in left_out} == left_out


def test_compressed_gradients_are_rounded_and_statistics_are_not(tmp_path):
    train(tmp_path / "run", "--set", "cluster.compression=bfloat16", timesteps=400)
    reference = sequential_state(tmp_path / "sequential", "ppo", timesteps=400)
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "ppo_distributed_final.pt")
    differences = [(state["model"][key] - tensor).abs().max().item() for key, tensor in reference["model"].items()]
    assert 1e-5 < max(differences) < 5e-3, "close, but not equal: less than the 16 steps of Adam could move"
    (exact,) = metrics(tmp_path / "sequential", "PPO_Sequential")
    (rounded,) = metrics(tmp_path / "run")
    assert rounded["step"] == exact["step"]
    assert rounded["losses/entropy"] == pytest.approx(exact["losses/entropy"], rel=1e-4)
    assert rounded["losses/value_loss"] == pytest.approx(exact["losses/value_loss"], rel=1e-3)
