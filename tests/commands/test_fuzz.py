"""Strangers' files, made by hypothesis: every one is read or refused with a sentence; none runs code or fills memory.

A few hundred inputs of each kind here; `make fuzz` takes 100,000 (RLCB_FUZZ=N for another number).
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run import checkpoint, metrics
from rl_cluster_benchmark.run.checkpoint_format import check_archive
from rl_cluster_benchmark.tools.analysis.series import read_series

COUNT = int(os.environ.get("RLCB_FUZZ", "300"))
EACH = 10  # inputs from one of hypothesis's examples: itself, and the rest with some bytes of it changed
MAX_GROWTH = 500 << 10  # KiB of memory that all inputs of a kind together may add
fuzz = settings(
    max_examples=-(-COUNT // EACH), deadline=None, database=None, suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink], print_blob=True,
)  # fmt: skip

# What no reader of a file may do
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.connect", "shutil.")
watching = False
done: list[str] = []


def _audit(event: str, args: object) -> None:
    if watching and event.startswith(FORBIDDEN):
        done.append(event)


sys.addaudithook(_audit)


class reading:  # noqa: N801
    """Within it nothing forbidden may happen."""

    def __enter__(self):
        global watching
        done.clear()
        watching = True

    def __exit__(self, *error):
        global watching
        watching = False
        assert not done, done


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """How many inputs there were, how long they took, what they did to the memory."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # it is the reading that is tested
    Counter.count = Counter.read = 0
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    yield
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    counted, seconds = Counter.count, time.monotonic() - start
    print(f"\n{counted:,} inputs in {seconds:.0f} s, {Counter.read:,} of them readable, {growth / 1024:.0f} MiB more")
    assert counted >= COUNT
    assert growth < MAX_GROWTH


class Counter:
    count = 0
    read = 0


def outcome(read) -> object:
    """What was read, or None if it was refused in one sentence."""
    Counter.count += 1
    with reading():
        try:
            result = read()
        except UserError as error:
            sentence = str(error)
        else:
            Counter.read += 1
            return result
    assert 10 < len(sentence) < 5000
    return None


# Values and damages

odd = st.sampled_from([10**400, -0.0, "", "3e-4"])
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | odd
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def variants(content: bytes, seed: int) -> Iterator[bytes]:
    """It, and some in which bytes are replaced, removed, repeated or added."""
    yield content
    generator = random.Random(seed)
    for _ in range(EACH - 1):
        data = bytearray(content)
        for _ in range(generator.randint(1, 4)):
            start = generator.randint(0, len(data))
            end = min(len(data), start + generator.choice([0, 1, 1, 4, 50]))
            data[start:end] = generator.choice([generator.randbytes(generator.randint(0, 8)), data[start:end] * 2])
        yield bytes(data)


seeds = st.integers(0, 2**32)


# Configs

SHORT = b"""\
algorithm: impala
env: {name: coinrun, num_envs: 64, seed: 3}
training:
  learning_rate: 3e-4
  gamma: 0.999  # a comment
  batch_size: 1_024
model: {channels: [16, 32, 32]}
impala: {num_actors: auto, replay_fraction: 0.5}
"""
KEYS = [f"{section}.{key}" if section else key for section, key, _ in configs.fields()]
HOSTILE = st.sampled_from(
    [
        "!!python/object/apply:os.system ['touch /tmp/pwned']",
        "!!python/name:os.system",
        "a: &a [x]\nb: *a",
        "<<: {env: {num_envs: 3}}",
        "[" * 5000,
        "{a: " * 100,
        "? [1, 2]\n: 3",
        "!!set {a, b}",
        "!!binary aGVsbG8=",
        "2001-01-01",
        "1_000:59:59",
        "env: !!omap [a: 1]",
        "\ufeffenv: {}",
        "--- 1\n--- 2",
        '"\\UFFFFFFFF"',
    ]
)


@st.composite
def settings_files(draw) -> bytes:
    content: dict = {}
    for key in draw(st.lists(st.sampled_from(KEYS) | st.text(max_size=10), max_size=5)):
        *sections, name = key.split(".")
        inside = content
        for section in sections:
            inside = inside.setdefault(section, {})
            if not isinstance(inside, dict):
                break
        else:
            inside[name] = draw(values)
    return yaml.safe_dump(content, allow_unicode=True).encode(errors="replace")


@fuzz
@given(st.binary(max_size=200) | st.just(SHORT) | settings_files() | HOSTILE.map(str.encode), seeds)
def test_configs(tmp_path_factory, content, seed):
    file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    for variant in variants(content, seed):
        file.write_bytes(variant)
        result = outcome(lambda: configs.load(file))
        assert result is None or isinstance(result, Config)


# Checkpoints


def small_checkpoint() -> dict:
    weights = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    episodes = {"count": 2, "first": [1.0, 0.0], "last": [1.0, 0.0], "last_lengths": [9, 9], "best": None}
    return {
        "format_version": 2, "written_by": "0", "config": configs.to_dict(Config()), "model": weights,
        "algorithm": {
            "optimizer": {"steps": 1.0, "moments": {"exp_avg": dict(weights)}},
            "reward_normalizer": {"mean": 0.0, "variance": 1.0, "count": 1.0},
        },
        "observation_shape": [10, 5], "num_actions": 3,
        "progress": {
            "steps": 5, "updates": 1, "elapsed": 1.0, "cpu_seconds": 1.0, "phase_seconds": {"env": 0.5},
            "peak_memory": 7, "episodes": episodes, "asynchrony": {"sums": {}, "counts": {}}, "bad_numbers": {},
            "random_state": {"seed": 1, "next_update": 1},
        },
    }  # fmt: skip


def sealed(content: bytes) -> bytes:
    """With a right checksum: it only proves that a file is whole."""
    import hashlib

    return content + checkpoint.MARK + hashlib.sha256(content).digest()


ARCHIVE = checkpoint.pack(small_checkpoint())
DESCRIPTION = next(name for name in zipfile.ZipFile(io.BytesIO(ARCHIVE)).namelist() if name.endswith("/data.pkl"))


def repacked(description: bytes) -> bytes:
    """The archive with another description of what is in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ARCHIVE)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            new.writestr(name, description if name == DESCRIPTION else old.read(name))
    return buffer.getvalue()


def paths(value, path=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths(inner, (*path, key))


PLACES = [path for path in paths(small_checkpoint()) if path[0] != "config" or len(path) < 3]
tensors = st.sampled_from(
    [torch.zeros(0), torch.tensor(float("nan")), torch.zeros(1).expand(10**6), torch.ones(2, dtype=torch.int64)]
)


@st.composite
def odd_states(draw) -> bytes:
    state = small_checkpoint()
    for path in draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=3)):
        inside = state
        for key in path[:-1]:
            inside = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            if draw(st.booleans()) and path[-1] in inside:
                del inside[path[-1]]
            else:
                inside[path[-1]] = draw(values | tensors)
    return checkpoint.pack(state)


def description_of(archive: bytes) -> bytes:
    return zipfile.ZipFile(io.BytesIO(archive)).read(DESCRIPTION)


GOOD_DESCRIPTION = description_of(ARCHIVE)


checkpoint.parse(sealed(ARCHIVE), Path("good.pt"))  # torch imports what it needs


@fuzz
@given(st.binary(max_size=100) | st.just(ARCHIVE) | odd_states(), seeds)
def test_checkpoints(content, seed):
    """Archives with a right and with a wrong checksum; and archives that are whole, but for what describes them."""
    for number, variant in enumerate(variants(content, seed)):
        read_checkpoint(variant if number == 1 else sealed(variant))


@fuzz
@given(st.just(GOOD_DESCRIPTION) | odd_states().map(description_of), seeds)
def test_descriptions_in_checkpoints(content, seed):
    for variant in variants(content, seed):
        read_checkpoint(sealed(repacked(variant)))


def read_checkpoint(content):
    result = outcome(lambda: checkpoint.parse(content, Path("fuzzed.pt")))
    if result is not None:
        assert result["progress"]["steps"] >= 0
        assert isinstance(result["config"]["env"]["name"], str)


def test_the_good_one_is_read():
    """Else the test above would prove little."""
    Counter.count = COUNT
    check_archive(ARCHIVE)
    assert checkpoint.parse(sealed(ARCHIVE), Path("good.pt"))["progress"]["steps"] == 5
    assert checkpoint.parse(sealed(repacked(GOOD_DESCRIPTION)), Path("good.pt"))["num_actions"] == 3


# Metrics

LINE = json.dumps({"step": 512, "time": 1.5, "update": 1, "charts/SPS": 341.0, "losses/entropy": 1.09}).encode()
numbers = st.integers() | st.floats() | st.sampled_from([10**400, -1, 0])
lines = st.one_of(
    st.binary(max_size=60),
    st.just(LINE),
    st.dictionaries(
        st.sampled_from(["step", "time", "update", "charts/SPS", "losses/x", "other"]) | st.text(max_size=5),
        numbers | values,
        max_size=6,
    ).map(lambda content: json.dumps(content).encode()),
    st.builds(lambda s, t, u: json.dumps({"step": s, "time": t, "update": u}).encode(), numbers, numbers, numbers),
    st.sampled_from([b"[" * 100_000, b'{"a":' * 5000, b'{"step": 1e999, "time": 0, "update": 1}', b"x" * 70_000]),
)


@fuzz
@given(st.lists(lines, max_size=6).map(b"\n".join), seeds)
def test_metrics(tmp_path_factory, content, seed):
    file = tmp_path_factory.getbasetemp() / "fuzzed.jsonl"
    for variant in variants(content, seed):
        file.write_bytes(variant)
        series = outcome(lambda: read_series(file))
        assert {len(column) for column in series.values()} == {len(series["step"])}
        assert all(len(column[column != column]) == 0 for name, column in series.items() if name in metrics.KEYS)
        with reading():
            found = metrics.read_lines(file)
            metrics.cut_after(file, seed % 600)
            kept = metrics.read_lines(file)
        assert len(kept) == sum(line["update"] <= seed % 600 for line in found)
