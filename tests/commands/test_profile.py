"""`rlcb profile`: exact counts, the true bottleneck of runs made to have one, nothing left behind."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.commands import ROOT, rlcb

from rl_cluster_benchmark.algorithms.ppo import PPO
from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.learning.batch import Batch
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.learning.minibatch import Moments
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.nets.models import ActorCritic, make_model
from rl_cluster_benchmark.profiling.pass_timers import IN_C, WHOLE_PASS, Passes
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.analysis.runs import load_run
from rl_cluster_benchmark.tools.profile import cost, finished, peak, verdict
from rl_cluster_benchmark.tools.profile.cost import Cost
from rl_cluster_benchmark.tools.profile.figures import Process, Profile, passes_per_step
from rl_cluster_benchmark.tools.profile.peak import Peak
from rl_cluster_benchmark.tools.profile.profile import _cpu_of_all

QUICK = ("--env", "Catch-v0", "--seconds", 1, "--no-peak", "--set", "hardware.num_threads=1")
# Catch is a few array operations; this network is not.
BIG_NETWORK = ("--set", "model.mlp_sizes=[512,512]")
SMALL_NETWORK = ("--set", "model.mlp_sizes=[8]")


def profile(output, *args, seconds_per_step=None):
    slow = {}
    if seconds_per_step is not None:
        path = os.pathsep.join([str(ROOT / "tests" / "slow_environments"), str(ROOT)])
        slow = {"PYTHONPATH": path, "SECONDS_PER_STEP": str(seconds_per_step)}
    done = rlcb("profile", *QUICK, *args, "--output-dir", output, variables=slow)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((output / "profile.json").read_text())
    for sentence in found["verdict"]:
        assert sentence in done.stdout
    assert found["verdict"][0].startswith("The bottleneck is ")
    assert found["bottleneck"] in found["verdict"][0]
    for process in found["processes"]:
        assert sum(process["shares"].values()) == pytest.approx(1.0, abs=0.02)
    traced = [process["traced_seconds"] for process in found["processes"] if process["operators"]]
    assert min(traced) > 0.9, "what was recorded while torch's profiler started does not count"
    return found, done.stdout


def test_a_slow_environment(tmp_path):
    trace = tmp_path / "trace.json"
    call = ("--mode", "sequential", "--num-envs", 16, "--batch-size", 256, "--set", "training.n_steps=16")
    found, text = profile(
        tmp_path / "out", *SMALL_NETWORK, *call, "--trace", trace, "--no-flame", seconds_per_step=0.01
    )
    assert found["bottleneck"] == verdict.ENVIRONMENT, found["verdict"]
    rows = {row["name"]: row["seconds"] for row in found["processes"][0]["operators"]}
    assert max(rows, key=rows.get) == "EnvPool: step", "code that torch cannot look into has rows of its own"
    assert "EnvPool: step" in text
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [".lock", "profile.json"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert "EnvPool: step" in {event.get("name") for event in events}
    again = rlcb("profile", *QUICK, "--output-dir", tmp_path / "out")
    assert again.returncode == 2
    assert "already holds a profile; add --overwrite" in again.stderr


def test_a_slow_network(tmp_path):
    # One worker: two of them would wait for each other on a machine that does something else as well.
    call = ("--mode", "parallel", "--num-workers", 1, "--num-envs", 16, "--batch-size", 512)
    more = ("--set", "training.n_steps=32", "--set", "parallel.pin=never")
    found, text = profile(tmp_path, *BIG_NETWORK, *call, *more)
    assert (tmp_path / "flame.svg").exists() or "No flame graph: py-spy" in text
    assert found["bottleneck"] == verdict.NETWORK, found["verdict"]
    assert [process["name"] for process in found["processes"]] == ["worker 0"]
    samples = found["processes"][0]["samples"]
    assert samples["forward"] == pytest.approx(4 * samples["inference"], rel=0.5), "four epochs over each step"
    assert abs(samples["backward"] - samples["forward"]) <= 512
    rate = found["passes"]["backward"]
    assert rate["gflops"] == pytest.approx(rate["samples"] * found["network"]["backward_flops"] / 1e9)


def test_a_starved_learner(tmp_path):
    call = ("--algorithm", "impala", "--mode", "parallel", "--num-envs", 8, "--set", "training.n_steps=16")
    split = ("--set", "impala.num_actors=1", "--set", "impala.num_learners=1", "--set", "parallel.pin=never")
    more = (*SMALL_NETWORK, "--batch-size", 64, "--no-flame")
    found, text = profile(tmp_path, *call, *split, *more, seconds_per_step=0.01)
    assert found["bottleneck"] == verdict.STARVED, found["verdict"]
    by_name = {process["name"]: process for process in found["processes"]}
    assert list(by_name) == ["learner 0", "actor 0"]
    assert by_name["learner 0"]["shares"]["waiting"] > 0.5
    assert by_name["actor 0"]["shares"]["env"] > 0.5
    assert "more actors" in text
    assert all(process["operators"] for process in found["processes"]), "a process of each role is traced"
    # Starting torch's profiler takes seconds, in which the other process waits: that is not what was measured.
    assert by_name["learner 0"]["seconds"] == pytest.approx(by_name["actor 0"]["seconds"], abs=0.5)


def test_operations_of_a_sample():
    """Against the definition: 2 x outputs x inputs of each, and backward twice that, but for the image's gradient."""
    config = config_files.load("ppo_procgen_paper")
    forward, first = 0, None
    in_channels, side = 3, 64
    for channels in (16, 32, 32):
        conv = 2 * 9 * in_channels * channels * side * side
        first = first or conv
        side //= 2
        forward += conv + 4 * 2 * 9 * channels * channels * side * side
        in_channels = channels
    forward += 2 * 32 * 8 * 8 * 256 + 2 * 256 * (15 + 1)
    found = cost.of_network(config)
    assert found.forward_flops == forward
    assert found.backward_flops == 2 * forward - first
    assert found.num_parameters == 626_256
    assert found.observation_bytes == 64 * 64 * 3
    toy = cost.of_network(config_files.load(None, {"env.name": "Catch-v0", "model.mlp_sizes": [8]}))
    assert toy.forward_flops == 2 * (50 * 8 + 8 * (3 + 1))


def test_the_peak_of_this_machine():
    found = peak.measure(detection.detect().physical_cores[:2])
    assert found.one_core["float32"] > 1
    assert found.one_core["memory"] > 0.5
    assert found.of("float32", 1, 1) == found.one_core["float32"]
    assert found.of("float32", 1, 2) == found.all_cores["float32"] / found.cores


@pytest.fixture
def native(monkeypatch):
    """A config, its network in C, and timers around the functions of this process."""
    for place, function, _ in (*IN_C, (ActorCritic, "features", ""), (ActorCritic, "pass_through", "")):
        monkeypatch.setattr(place, function, getattr(place, function))  # put back at the end
    config = config_files.load("ppo_procgen_paper")
    model = make_model(config.model, (64, 64, 3), 15, config.hardware, torch.float32, "native")
    assert model.native_trunk is not None
    passes = Passes()
    passes.install()
    return config, model, passes


def test_the_native_network_has_rows_of_its_own(native):
    _, model, passes = native
    images = torch.zeros(4, 64, 64, 3, dtype=torch.uint8)
    with torch.no_grad():
        model(images)
    features, back = model.pass_through(images)
    passes.recording = True
    with torch.profiler.profile() as profiler:
        back(torch.ones_like(features))
        model.pass_through(images)
    rows = {row.key for row in profiler.key_averages()}
    assert {"native network: forward", "native network: backward"} <= rows
    assert passes.samples == {"inference": 4, "forward": 8, "backward": 4}
    assert passes.seconds["native network: forward"] < passes.seconds["inference"] + passes.seconds["forward"]


def test_passes_in_one_call_are_counted_part_by_part(native):
    config, model, passes = native
    ppo = PPO(config, model, env_ids=[0], micro_batch=4, reduce=Alone())
    images = torch.zeros(20, 64, 64, 3, dtype=torch.uint8)
    batch = Batch(images, torch.ones(20), torch.zeros(20, dtype=torch.int64), *torch.randn(4, 20))
    gradient = ppo.on_policy.gradients.passes(batch, Moments(20.0, 0.0, 1.0), ppo.objective)
    gradient.write(np.arange(7), 0)
    assert passes.samples == {"inference": 0, "forward": 7, "backward": 7}
    parts = [passes.seconds[name] for name in ("forward", "C heads and losses", "backward")]
    assert min(parts) > 0
    assert sum(parts) < passes.seconds[WHOLE_PASS] < 1.2 * sum(parts) + 0.01
    passes.recording = True
    with torch.profiler.profile() as profiler:
        gradient.write(np.arange(3), 0)
    assert WHOLE_PASS in {row.key for row in profiler.key_averages()}


def process(role="worker", rank=0, cpu=1.0, **shares):
    everything = dict.fromkeys(("env", "inference", "update", "communication", "waiting", "other"), 0.0) | shares
    passes = {"forward": 0.2, "backward": 0.4, "inference": 0.1}
    samples = {"forward": 100, "backward": 100, "inference": 100}
    usage = dict.fromkeys(("minor_faults", "major_faults", "waits", "preemptions"), 0.0)
    return Process(rank, role, 1.0, everything, cpu, usage, passes, samples, [], 0.0)


def make(*processes, cores=(1.0, 1.0), precision="bfloat16", engine="native"):
    figures = {"float32": 100.0, "bfloat16": 200.0, "memory": 20.0}
    return Profile(
        list(processes), 1000.0, list(cores), precision, engine, 1, 512, 3.0,
        Cost(61_000_000, 120_000_000, 626_256, 12_288, 500_000),
        Peak(2, figures, {name: 2 * value for name, value in figures.items()}), {},
    )  # fmt: skip


MACHINE = replace(detection.detect(), usable_cores=2, flags=frozenset({"avx512_bf16"}))


@pytest.mark.parametrize(
    ("processes", "changes", "bottleneck", "words"),
    [
        ([process(update=0.5, communication=0.5 + 0.1)], {}, verdict.COMMUNICATION, "larger training.batch_size"),
        ([process(update=0.3, waiting=0.6)], {}, verdict.UNEVEN, "parallel.balance (now 0.5)"),
        ([process(update=0.7, env=0.3)] * 2, {}, verdict.NETWORK, "30 GFLOP"),
        ([process(env=0.9, update=0.1)], {}, verdict.ENVIRONMENT, "cores are idle"),
        ([process(env=0.9, update=0.1)] * 2, {}, verdict.ENVIRONMENT, "All cores are in use"),
        (
            [process("learner", update=0.9, waiting=0.1), process("actor", env=0.2, inference=0.2, waiting=0.6)],
            {"algorithm": "impala"}, verdict.NETWORK, "more learners",
        ),
        (
            [process("learner", update=1.0)] * 2 + [process("actor", env=0.2, inference=0.2, waiting=0.6)],
            {"algorithm": "impala"}, verdict.NETWORK, "more cores, or a smaller network",
        ),
        (
            [process("learner", update=0.4, waiting=0.6), process("actor", env=0.2, inference=0.8)],
            {"algorithm": "impala"}, verdict.STARVED, "making inference cheaper",
        ),
        (
            [process("learner", update=0.9, waiting=0.1), process("actor", env=0.2, inference=0.8)],
            {"algorithm": "impala"}, verdict.NETWORK, "in balance",
        ),
        (
            [process("learner", update=0.2, communication=0.7), process("actor", env=0.4, inference=0.1, waiting=0.5)],
            {"algorithm": "impala"}, verdict.COMMUNICATION, "fewer learners",
        ),
    ],
)  # fmt: skip
def test_verdicts(processes, changes, bottleneck, words):
    config = config_files.load(None, {"mode": "parallel", **changes})
    found = verdict.judge(make(*processes, cores=(1.0,)), config, MACHINE)
    assert found.bottleneck == bottleneck
    assert words in " ".join(found.sentences)
    assert 2 <= len(found.sentences) <= 3


@pytest.mark.parametrize(
    ("changes", "costs", "words", "others"),
    [
        ({"algorithm": "a2c"}, {"update": 1.0}, "a smaller network", "n_epochs"),
        ({"algorithm": "ppo"}, {"update": 1.0}, "fewer training.n_epochs", "impala.passes"),
        ({"algorithm": "a2c"}, {"communication": 1.0}, "a larger training.n_steps", "batch_size"),
        ({"algorithm": "a2c", "env.name": "Catch-v0"}, {"waiting": 1.0}, "parallel.balance (now 0)", "now 0.5"),
        ({"algorithm": "a3c"}, {"waiting": 1.0}, "only at the end", "parallel.balance"),
    ],
)
def test_advice_names_what_the_algorithm_uses(changes, costs, words, others):
    config = config_files.load(None, {"mode": "parallel", **changes})
    found = verdict.judge(make(*[process(**costs)] * 2), config, MACHINE)
    text = " ".join(found.sentences)
    assert words in text
    assert others not in text


def test_advice_for_several_machines():
    """There --num-workers is the number of machines, and the numbers of actors and learners hold for each of them."""
    config = config_files.load(None, {"algorithm": "impala", "mode": "distributed", "cluster.num_workers": 2})
    starved = [process("learner", update=0.4, waiting=0.6), process("actor", env=0.2, inference=0.8)] * 2
    assert "What would help: more actors" in verdict.judge(make(*starved), config, MACHINE).sentences[1]
    idle = verdict.judge(
        make(process(env=0.9, update=0.1, cpu=0.5)), config_files.load(None, {"mode": "distributed"}), MACHINE
    )
    assert "more --workers-per-node, steps" in idle.sentences[1]


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"algorithm": "ppo", "training.n_epochs": 3}, 3),
        ({"algorithm": "a2c"}, 1),
        ({"algorithm": "impala", "impala.passes": 2}, 2),
        ({"algorithm": "impala", "impala.replay_fraction": 0.75}, 4),
    ],
)
def test_what_is_learned_from_again_counts_again(changes, passes):
    assert passes_per_step(config_files.load(None, {"mode": "parallel", **changes})) == passes


def test_what_the_runs_own_parents_take_is_not_by_anything_else():
    """The parent of the workers, and the server that starts them, are of the run."""
    profile = replace(make(process(cpu=0.8), cores=(0.9, 0.5)), parents_cpu=0.5)
    assert profile.own_cpu == pytest.approx(1.3)
    assert profile.others_cpu == pytest.approx(0.1)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before, began = _cpu_of_all(), time.monotonic()
        while _cpu_of_all()[child.pid] <= before.get(child.pid, 0.0):
            assert time.monotonic() - began < 60
            time.sleep(0.05)
        assert os.getpid() in before
    finally:
        child.kill()
        child.wait()


def test_advice_follows_the_config():
    slow = make(process(update=1.0), precision="float32", engine="torch", cores=(1.0, 1.0))
    found = verdict.judge(slow, config_files.load(None, {"mode": "sequential"}), MACHINE)
    assert "hardware.precision=bfloat16 (the CPU has AVX512-BF16); --mode parallel" in found.sentences[1]
    assert "Something else took 1.0 of 2 cores" in found.sentences[2]
    assert slow.rate("backward").gflops == pytest.approx(100 / 0.4 * 0.12)
    assert slow.rate("backward").of_peak == pytest.approx(100 / 0.4 * 0.12 / 100)
    low, high = slow.traffic()
    assert 0 < low < high


def test_a_step_that_workers_divide_moves_less_memory():
    apart = make(*[process(update=1.0)] * 4)
    together = replace(apart, shares_work=True)
    saved = 3 * 4 * (1 + 3 * 2) * 626_256 * 1000.0 * 3.0 / 512 / 1e9  # three workers less that step all parameters
    for alone, divided in zip(apart.traffic(), together.traffic(), strict=True):
        assert alone - divided == pytest.approx(saved)


def test_a_run_that_is_over(trained):
    done = rlcb("profile", "--of", trained)
    assert done.returncode == 0, done.stderr
    shares = json.loads((trained / "training_summary.json").read_text())["phase_shares"]
    assert f"{shares['env']:.1%}" in done.stdout
    assert "The bottleneck is the " in done.stdout


def write_run(folder, changes, shares, **asynchrony):
    config = config_files.load(None, changes)
    summary = {
        "state": "finished", "total_timesteps": 10, "total_updates": 1, "duration_hours": 1, "avg_fps": 3,
        "final_fps": 3, "peak_memory_gb": 1, "num_workers": 4, "usable_cores": 8, "phase_shares": shares,
        "asynchrony": asynchrony,
    }  # fmt: skip
    (folder / "config.yaml").write_text(config_files.to_yaml(config))
    (folder / "training_summary.json").write_text(json.dumps(summary))
    log = RunDirectory.of(config_files.load(None, changes | {"output_dir": str(folder)})).metrics_log
    log.parent.mkdir(parents=True)
    log.write_text(json.dumps({"step": 10, "time": 1.0, "update": 1}) + "\n")


def test_a_slow_network_between_machines(tmp_path):
    shares = {"env": 0.1, "inference": 0.1, "update": 0.2, "communication": 0.55, "waiting": 0.05, "other": 0.0}
    write_run(tmp_path, {"mode": "distributed"}, shares)
    done = rlcb("profile", "--of", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The bottleneck is the communication." in done.stdout
    assert "cluster.compression=bfloat16" in done.stdout


def test_a_slow_network_between_the_learners_of_several_machines(tmp_path):
    """Learners that sum gradients are busy, and actors wait for them, but not because of the neural network."""
    shares = {"env": 0.2, "inference": 0.05, "update": 0.1, "communication": 0.35, "waiting": 0.3, "other": 0.0}
    changes = {"algorithm": "impala", "mode": "distributed", "impala.num_learners": 2, "cluster.num_workers": 2}
    write_run(tmp_path, changes, shares, learner_idle=0.05, actor_idle=0.5)
    done = rlcb("profile", "--of", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The bottleneck is the communication between the learners" in done.stdout
    assert "cluster.sync=async" in done.stdout


def test_an_impala_run_that_is_over(tmp_path):
    """The mean over four actors and one learner; only actors act."""
    shares = {"env": 0.4, "inference": 0.32, "update": 0.08, "communication": 0.0, "waiting": 0.2, "other": 0.0}
    changes = {"algorithm": "impala", "mode": "parallel", "impala.num_learners": 1, "parallel.num_workers": 4}
    write_run(tmp_path, changes, shares, learner_idle=0.6, actor_idle=0.1)
    done = rlcb("profile", "--of", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "learners wait 60% of their time for experience (actors: 4, learners: 1)" in done.stdout
    assert "the environments (50%) and to inference (40%)" in done.stdout
    assert rlcb("profile", "--of", tmp_path / "nothing").returncode == 2


def test_an_impala_run_of_several_machines_that_is_over(tmp_path):
    """The config tells of one machine's learners, the summary of all."""
    shares = {"env": 0.25, "inference": 0.15, "update": 0.2, "communication": 0.1, "waiting": 0.1, "other": 0.2}
    changes = {"algorithm": "impala", "mode": "distributed", "impala.num_learners": 2, "cluster.num_workers": 2}
    write_run(tmp_path, changes, shares, learner_idle=0.1, actor_idle=0.1)
    for name, learners in (("as it is", 4), ("without it", None)):
        file = tmp_path / "training_summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_learners": learners}))
        run = load_run(tmp_path)
        learner, actor = ([p for p in finished._processes(run, 4.0) if p.role == role] for role in ("learner", "actor"))
        assert (len(learner), len(actor)) == (4, 4), name
        assert learner[0].shares["update"] == pytest.approx(0.4), name
        for phase, share in shares.items():
            assert sum(p.shares[phase] for p in learner + actor) / 8 == pytest.approx(share), (name, phase)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--seconds", "0"), "--seconds: 0 is not allowed"),
        (("--mode", "distributed"), "rlcb profile trains on one machine"),
        (("--set", "hardware.device=cuda", "--mode", "sequential"), "rlcb profile is about CPUs"),
    ],
)
def test_wrong_inputs(args, text, tmp_path):
    done = rlcb("profile", *QUICK, "--output-dir", tmp_path, *args)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not os.listdir(tmp_path)
