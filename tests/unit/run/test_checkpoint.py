"""Checkpoint files: whole, damaged, foreign, older, newer, hostile."""

import io
import json
import os
import pickle
import subprocess
import zipfile

import pytest
import torch
from helpers.commands import TINY, tiny_run

from rl_cluster_benchmark.cli.main import main
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.run import checkpoint
from rl_cluster_benchmark.run.checkpoint import DamagedCheckpointError
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.training import training


@pytest.fixture(scope="module")
def good(trained):
    return trained / "checkpoints" / "ppo_sequential_final.pt"


def changed(good, target, change):
    """A checkpoint with a right checksum and another content."""
    state = checkpoint.unpack(checkpoint.checked(good.read_bytes(), good))
    change(state)
    checkpoint.save(target, state)
    return target


DAMAGES = {
    "empty": (lambda data: b"", "the file is empty"),
    "cut short": (lambda data: data[: len(data) // 2], "is damaged or cut short"),
    "without its last byte": (lambda data: data[:-1], "its checksum is wrong"),
    "longer": (lambda data: data + b"x", "its checksum is wrong"),
    "a flipped bit": (lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:], "its checksum is wrong"),
    "foreign": (lambda data: b"GIF89a" + data, "no checkpoint of this program"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_refused_in_one_sentence(name, good, tmp_path):
    damage, sentence = DAMAGES[name]
    file = tmp_path / "bad.pt"
    file.write_bytes(damage(good.read_bytes()))
    with pytest.raises(DamagedCheckpointError, match=sentence) as caught:
        checkpoint.load(file)
    assert "\n" not in str(caught.value)


def test_every_single_bit_counts(good, tmp_path):
    data = good.read_bytes()
    for position in range(0, len(data), 97):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(DamagedCheckpointError):
            checkpoint.parse(bytes(flipped), good)


def test_format_1_is_read(good, tmp_path):
    def as_it_was(state):
        state["format_version"] = 1
        del state["progress"]["asynchrony"], state["progress"]["bad_numbers"], state["written_by"]
        del state["config"]["cluster"]["timeout"]  # a setting of today's version

    state = checkpoint.load(changed(good, tmp_path / "old.pt", as_it_was))
    assert state["progress"]["bad_numbers"] == {}
    assert state["config"]["cluster"]["timeout"] == 60.0


def test_a_newer_format_is_refused_with_the_reason_and_left_alone(trained, good, tmp_path):
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, output], check=True)
    final = output / "checkpoints" / good.name
    changed(good, final, lambda state: state.update(format_version=3))
    done = tiny_run(output, "--resume", timesteps=9000)
    assert done.returncode == 2
    assert "has format 3, this version reads 1 to 2; use the version of the program that wrote it" in done.stderr
    assert final.exists(), "it is not damaged"


def set_in(state, *keys, value):
    for key in keys[:-1]:
        state = state[key]
    state[keys[-1]] = value


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("progress", "steps"), "many"),
        (("progress", "steps"), -1),
        (("progress", "elapsed"), float("nan")),
        (("progress", "episodes"), {}),
        (("model",), {"weight": 3}),
        (("algorithm", "optimizer", "moments"), [1]),
        (("algorithm", "reward_normalizer", "variance"), float("inf")),
        (("progress", "episodes", "last_lengths"), torch.zeros(1).expand(10**9)),
        (("model",), {"weight": torch.zeros(1).expand(10**12)}),
        (("config", "mode"), torch.zeros(1).expand(10**9)),
        (("observation_shape",), []),
        (("num_actions",), 0),
        (("format_version",), "2"),
    ],
)
def test_content_that_no_run_writes_is_refused(keys, value, good, tmp_path):
    file = changed(good, tmp_path / "odd.pt", lambda state: set_in(state, *keys, value=value))
    with pytest.raises(DamagedCheckpointError, match="is not a checkpoint of this program"):
        checkpoint.load(file)


def test_a_network_whose_checkpoint_could_not_be_read_is_refused(tmp_path, monkeypatch, call):
    monkeypatch.setattr(training, "MAX_BYTES", 100_000)
    for sizes, refused in (
        ("[64, 64]", False),
        ("[128, 128]", True),
    ):  # 12 bytes for each of 8,000 and 23,000 parameters
        output = tmp_path / str(refused)
        args = ("--set", f"model.mlp_sizes={sizes}", "--total-timesteps", 600, "--output-dir", output)
        status, _, err = call("train", *TINY, *args)
        assert status == (2 if refused else 0), err
        assert ("A checkpoint of a network of these sizes has" in err) == refused
        assert (output / "config.yaml").exists() != refused


def test_a_config_that_this_version_does_not_know(good, tmp_path):
    file = changed(good, tmp_path / "odd.pt", lambda state: set_in(state, "config", "training", "magic", value=1))
    with pytest.raises(UserError, match="other settings than this version knows"):
        checkpoint.load(file)


def resealed(archive: bytes) -> bytes:
    import hashlib

    return archive + checkpoint.MARK + hashlib.sha256(archive).digest()


def test_a_packed_archive_is_refused_before_it_is_unpacked(good, tmp_path):
    """Ten megabytes of zeros take ten kilobytes packed; a thousand times that would fill the memory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/data/0", bytes(10_000_000))
    (tmp_path / "bomb.pt").write_bytes(resealed(buffer.getvalue()))
    with pytest.raises(DamagedCheckpointError, match="parts of it are packed"):
        checkpoint.load(tmp_path / "bomb.pt")


@pytest.mark.parametrize("bomb", [(bytearray, (1 << 40,)), (os.system, ("false",)), (torch.zeros, (1 << 40,))])
def test_calls_are_refused_before_they_are_made(bomb, tmp_path):
    class Bomb:
        def __reduce__(self):
            return bomb

    checkpoint.save(tmp_path / "bomb.pt", {"model": Bomb()})
    with pytest.raises(DamagedCheckpointError, match="could run code"):
        checkpoint.load(tmp_path / "bomb.pt")


def test_inspect(good, capsys):
    assert main(["checkpoint", "inspect", str(good), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    state = checkpoint.load(good)
    assert (found["format"], found["steps"]) == (2, state["progress"]["steps"])
    assert found["parameters"] == sum(tensor.numel() for tensor in state["model"].values())
    assert found["finite"] is True
    assert main(["checkpoint", "inspect", str(good)]) == 0
    assert f"Steps             {state['progress']['steps']:,}" in capsys.readouterr().out


def test_verify(trained, good, tmp_path, capsys):
    assert main(["checkpoint", "verify", str(trained)]) == 0
    assert "4 of 4 checkpoints are good." in capsys.readouterr().out
    (tmp_path / "bad.pt").write_bytes(good.read_bytes()[:-5])
    changed(good, tmp_path / "nan.pt", lambda state: next(iter(state["model"].values())).fill_(float("nan")))
    assert main(["checkpoint", "verify", str(tmp_path), str(good)]) == 1
    text = capsys.readouterr().out
    assert "1 of 3 checkpoints are good." in text
    assert f"BAD   {tmp_path / 'nan.pt'}: it holds NaN or infinite weights." in text


def test_the_newest_good_one_stays_until_a_newer_one_is_complete(trained, tmp_path, monkeypatch):
    """A write that fails half-way leaves every checkpoint that was there."""
    output = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, output], check=True)
    from rl_cluster_benchmark.config import config_files
    from rl_cluster_benchmark.core.errors import TrainingFailedError

    directory = RunDirectory.of(config_files.load(output / "config.yaml", {"output_dir": str(output)}))
    before = {file: file.read_bytes() for file in (output / "checkpoints").iterdir()}
    _, state = checkpoint.newest(directory)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TrainingFailedError, match="No space left"):
        checkpoint.save(directory.step_checkpoint(10**9), state)
    assert {file: file.read_bytes() for file in (output / "checkpoints").iterdir()} == before
