"""Which variant of the C code a run takes, on machines that have AMX and that have not."""

from dataclasses import replace

import pytest
import torch
from helpers.commands import needs_native

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.kernels import build, choice, heads, native_network
from rl_cluster_benchmark.machine import detection, planning
from rl_cluster_benchmark.tools.tune.tuning_space import TuningSpace

pytestmark = needs_native


@pytest.fixture
def machine(with_amx, monkeypatch):
    """A machine with AMX on which bfloat16 takes this fraction of the time of float32."""
    monkeypatch.setattr(native_network, "agrees_with_torch", lambda library, architecture: True)
    measured = []

    def have(time=0.5, *, kernels=""):
        def seconds(trunks):
            measured.append(list(trunks))
            return {"float32": 1.0, "bfloat16": time}

        with_amx(kernels)
        monkeypatch.setattr(choice, "seconds_of_passes", seconds)
        return measured

    return have


def planned(threads=1, **hardware):
    config = Config.model_validate({"hardware": {"num_threads": threads, **hardware}})
    return config, planning.compiled(config, planning.plan(config))


@pytest.mark.parametrize(("time", "precision"), [(0.5, "bfloat16"), (0.99, "float32"), (1.5, "float32")])
def test_the_faster_one_is_taken_and_measured_once(machine, time, precision):
    measured = machine(time)
    for _ in range(2):
        config, plan = planned()
    best = build.load().variant.name
    assert (plan.engine, plan.precision) == ("native", precision)
    assert plan.variant == ("amx" if precision == "bfloat16" else best)
    assert measured == [["float32", "bfloat16"]]
    reason = f"measured: amx is {1 / time:.2f} times as fast as {best}"
    assert f"Precision: {precision} ({reason}) | Network: native ({plan.variant})" in "\n".join(plan.lines(config))


def test_what_is_set_is_not_measured(machine):
    measured, best = machine(), build.load().variant.name
    found = [planned(precision=precision)[1] for precision in ("bfloat16", "float32")]
    assert [(plan.precision, plan.variant) for plan in found] == [("bfloat16", "amx"), ("float32", best)]
    assert {plan.precision_reason for plan in found} == {"set"}
    assert not measured


def test_several_threads_take_float32(machine):
    measured = machine()
    assert planned(threads=2)[1].precision == "float32"
    assert planned(threads=2, precision="bfloat16")[1].engine == "torch"
    assert planned(engine="native", precision="bfloat16")[1].engine == "native"
    with pytest.raises(UserError, match=r"needs hardware.precision float32 or auto, or AMX and one"):
        planned(threads=2, engine="native", precision="bfloat16")
    assert not measured


def test_without_amx_bfloat16_is_torchs(monkeypatch):
    others = frozenset(feature for feature in build.cpu_features() if not feature.startswith("amx"))
    monkeypatch.setattr(build, "cpu_features", lambda: others | {"avx512_bf16"})
    assert planned(precision="bfloat16")[1].engine == "torch"
    assert (planned()[1].precision, planned()[1].engine) == ("float32", "native")


def test_a_network_that_amx_does_not_compute_is_not_measured(machine):
    measured = machine()
    config = Config.model_validate({"hardware": {"num_threads": 1}, "model": {"channels": [16, 16, 16, 16]}})
    assert planning.compiled(config, planning.plan(config)).precision == "float32"
    assert not measured


def test_a_variant_that_is_named_is_taken(machine):
    best = build.load().variant.name
    measured = machine(kernels="amx")
    plan = planned()[1]
    assert (plan.variant, plan.precision) == ("amx", "bfloat16")
    assert plan.precision_reason == "the network in C computes in it"
    assert heads.available()
    assert build.load("float32") is None
    machine(kernels=best)
    plan = planned()[1]
    assert (plan.variant, plan.precision) == (best, "float32")
    assert not measured


@pytest.mark.parametrize(
    ("kernels", "settings", "says"),
    [
        ("amx", {"threads": 2}, "RLCB_KERNELS = amx needs hardware.precision bfloat16 or auto and one thread"),
        ("amx", {"precision": "float32"}, "RLCB_KERNELS = amx needs hardware.precision bfloat16 or auto"),
        ("plain", {"precision": "bfloat16"}, "RLCB_KERNELS = plain needs hardware.precision float32 or auto; "),
        ("fast", {}, "RLCB_KERNELS = fast: there is no such variant, only amx, avx512, avx2, neon, plain"),
    ],
)  # fmt: skip
def test_a_variant_that_does_not_suit_is_said(machine, kernels, settings, says):
    machine(kernels=kernels)
    with pytest.raises(UserError, match=says):
        planned(**settings)


def test_a_variant_that_this_cpu_cannot_run_is_said(monkeypatch):
    monkeypatch.setenv("RLCB_KERNELS", "amx")
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"avx2", "fma"}))
    with pytest.raises(UserError, match=r"RLCB_KERNELS = amx needs amx_bf16, amx_tile, avx512_bf16, .* this CPU lacks"):
        planned()


@pytest.mark.skipif("amx_tile" in build.cpu_features(), reason="this CPU has AMX")
def test_tiles_that_the_system_refuses_are_not_used(monkeypatch):
    features = build.cpu_features() | {"amx_tile", "amx_bf16", "avx512_bf16"}
    monkeypatch.setattr(build, "cpu_features", lambda: features)
    for cached in (native_network.available, choice.choose):
        cached.cache_clear()
    assert build.load("bfloat16").variant.name == "amx"
    assert planned()[1].precision == "float32"
    assert planned(precision="bfloat16")[1].engine == "torch"
    for cached in (build.load, native_network.available, choice.choose):
        cached.cache_clear()


def test_vectors_need_no_variant(machine):
    machine(kernels="amx")
    config = Config.model_validate({"env": {"name": "CartPole-v1"}, "hardware": {"num_threads": 2}})
    assert planning.compiled(config, planning.plan(config)).engine == "torch"


def test_actors_have_their_own_precision_in_c(machine):
    machine()
    data = {"algorithm": "impala", "hardware": {"num_threads": 1, "precision": "float32"}}
    for asked, dtype in native_network.DTYPES.items():
        config = Config.model_validate({**data, "impala": {"inference_precision": asked}})
        assert planning.acting(config, planning.plan(config)) == (dtype, "native")


def test_tuning_tries_the_other_precision_too(machine, monkeypatch):
    """Of processes with one thread; several threads compute in float32."""
    four = replace(detection.detect.__wrapped__(), usable_cores=4, allowed_cores=4, physical_cores=tuple(range(4)))
    monkeypatch.setattr(detection, "detect", lambda: four)
    for time in (0.5, 1.5):
        machine(time)
        settings = TuningSpace(config_files.load("ppo_procgen_paper"), four).settings
        in_c = {(s.layout.threads, s.precision) for s in settings if s.engine == "native"}
        assert in_c == {(1, "bfloat16"), (1, "float32"), (2, "float32"), (4, "float32")}


@pytest.mark.parametrize("architecture", ["impala", "nature"])
def test_passes_of_both_are_measured(with_amx, architecture, monkeypatch):
    with_amx()
    for name in ("SAMPLES", "FEWEST"):
        monkeypatch.setattr(choice, name, 2)
    monkeypatch.setattr(choice, "SECONDS", 0.0)
    torch.set_num_threads(2)
    try:
        found = choice.choose(architecture, (16, 32, 32), 256, ("float32", "bfloat16"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert found.precision == "float32", "emulated tiles are slow"
    assert found.reason.startswith("measured: amx is 0.")
