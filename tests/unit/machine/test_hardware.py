"""What this process may use of the machine."""

import os
import subprocess
import sys

import pytest
from helpers.commands import ROOT

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.kernels import build
from rl_cluster_benchmark.machine import detection, planning


@pytest.fixture
def machine(monkeypatch):
    """A made-up machine: `set` gives it CPU flags and cores."""

    def change(**changes):
        fields = {**vars(detection.detect.__wrapped__()), **changes}
        monkeypatch.setattr(detection, "detect", lambda: detection.Machine(**fields))

    return change


@pytest.mark.parametrize(
    ("flags", "precision"),
    [({"amx_bf16", "avx512_bf16"}, "bfloat16"), ({"avx512_bf16"}, "bfloat16"), ({"avx2"}, "float32")],
)
def test_precision_of_torch_follows_the_cpu(machine, flags, precision):
    machine(flags=frozenset(flags))
    assert planning.plan(Config.model_validate({"hardware": {"engine": "torch"}})).precision == precision
    set_by_hand = Config.model_validate({"hardware": {"precision": "float32"}})
    assert planning.plan(set_by_hand).precision == "float32"


def test_without_compiled_code_torch_computes_in_its_fastest_precision(machine, monkeypatch):
    machine(flags=frozenset({"avx512_bf16"}))
    monkeypatch.setattr(build, "load", lambda *_: None)
    plan = planning.compiled(Config(), planning.plan(Config()))
    assert (plan.engine, plan.precision) == ("torch", "bfloat16")
    native = Config.model_validate({"hardware": {"engine": "native"}})
    with pytest.raises(UserError, match="needs a C compiler"):
        planning.compiled(native, planning.plan(native))


def test_plan(machine):
    machine(usable_cores=4, allowed_cores=4)
    plan = planning.plan(Config())
    assert (plan.num_threads, plan.micro_batch) == (4, 256)
    many = planning.plan(Config.model_validate({"hardware": {"num_threads": 9, "micro_batch": 32}}))
    assert (many.num_threads, many.micro_batch) == (9, 32)
    assert "Warning: 9 busy threads on 4 cores" in "\n".join(many.lines(Config()))


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ({}, "native"),
        ({"channels": [16, 24]}, "torch"),
        ({"architecture": "nature"}, "native"),
        ({"architecture": "nature", "channels": [16, 24]}, "native"),
        ({"architecture": "nature", "hidden_size": 40}, "torch"),
        ({"architecture": "mlp"}, "torch"),
    ],
)
def test_the_engine_follows_the_network(machine, model, engine):
    machine(flags=frozenset({"avx512_bf16"}))
    settings = {"model": model, "hardware": {"num_threads": 1}}
    assert planning.plan(Config.model_validate(settings)).engine == engine
    asked = Config.model_validate({**settings, "hardware": {"num_threads": 1, "engine": "native"}})
    if engine == "native":
        assert planning.plan(asked).engine == "native"
    else:
        with pytest.raises(UserError, match="engine = native needs"):
            planning.plan(asked)


def test_no_worker_is_without_an_environment(machine):
    machine(usable_cores=128, allowed_cores=128)
    config, plan = planning.resolve(Config.model_validate({"mode": "parallel", "env": {"num_envs": 64}}))
    assert (config.parallel.num_workers, plan.num_workers) == (64, 64)
    assert any("Workers: 64 (one per environment" in line for line in plan.lines(config))
    each_has_two = {"mode": "parallel", "parallel": {"num_envs_per_worker": 2}}
    config, plan = planning.resolve(Config.model_validate(each_has_two))
    assert (plan.num_workers, config.env.num_envs) == (128, 256)


def test_affinity_limits_the_cores():
    one = min(os.sched_getaffinity(0))
    code = "from rl_cluster_benchmark.machine import detection; print(detection.detect().usable_cores)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {one}),
    )  # fmt: skip
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("files", "quota", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1000"}, 1.5, 1000),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000", "memory.limit_in_bytes": "5"}, 2.0, 5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None, None),
    ],
)
def test_cgroup_limits(files, quota, memory, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(detection, "_cgroup_dirs", lambda controller: [tmp_path])
    assert detection._cgroup_cpu_quota() == quota
    assert detection._memory_limit() == (memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
