"""Disks that are full, gone or read-only, shared memory that is too small, clocks that jump."""

import contextlib
import json
import os
import shutil
import subprocess
import time

import invariants
import pytest
from harness import MODES, Faulty

LONG = os.environ.get("RLCB_FAULTS") == "long"
SEQUENTIAL, PPO = MODES[0], MODES[1]
HERE = [mode for mode in MODES if mode.mode != "distributed"] if LONG else [PPO]


@pytest.fixture
def disk(tmp_path):
    """A small one: (its folder, a function that mounts it again with other options)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a small disk needs root")

    def remount(options):
        subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)

    yield folder, remount
    subprocess.run(["umount", "--lazy", folder], check=True)


def resume(mode, output):
    """Goes on, comes to its end, and all that has to hold does."""
    history = {}
    steps = invariants.check_newest(output, history)
    with Faulty(mode, output, timesteps=steps + 3000) as run:
        assert run.wait(90) == 0, run.text
        assert not run.leftovers()
    invariants.check(output, mode, starts=3, history=history)


def ended(run, *sentences):
    assert run.wait(60) == 1, run.text
    assert not run.leftovers()
    assert "Traceback" not in run.text
    for sentence in sentences:
        assert sentence in run.text, run.text


@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
@pytest.mark.parametrize("what", ["checkpoint", pytest.param("log", marks=pytest.mark.long)])
def test_a_full_disk(mode, what, disk):
    folder, remount = disk
    remount("size=10m")
    more = ("--resume-if-present", "--set", "logging.tensorboard=false")
    more += ("--set", "training.save_interval=100000") if what == "log" else ("--set", "model.mlp_sizes=[64, 64]")
    with Faulty(mode, folder / "run", more=more) as run:
        run.wait_for_updates(5)
        with contextlib.suppress(OSError), open(folder / "filler", "wb") as filler:
            while True:
                filler.write(bytes(4096))
                filler.flush()
        ended(run, "error: Cannot write", "No space left on device", "--resume goes on from the newest")
    os.unlink(folder / "filler")
    remount("size=64m")
    resume(mode, folder / "run")


@pytest.mark.long
@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_a_disk_that_becomes_read_only(mode, disk):
    folder, remount = disk
    remount("size=64m")
    with Faulty(mode, folder / "run") as run:
        run.wait_for_updates(5)
        # The log is open for writing, so the disk cannot change; the folder of the checkpoints can.
        subprocess.run(["mount", "--bind", folder / "run" / "checkpoints", folder / "run" / "checkpoints"], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,bind,ro", folder / "run" / "checkpoints"], check=True)
            ended(run, "error: Cannot write", "Read-only file system")
        finally:
            subprocess.run(["umount", folder / "run" / "checkpoints"], check=True)
    resume(mode, folder / "run")


@pytest.mark.long
@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_an_output_directory_that_is_removed(mode, tmp_path):
    output = tmp_path / "run"
    with Faulty(mode, output) as run:
        run.wait_for_updates(5)
        shutil.rmtree(output)
        ended(run, "error: Cannot write", "No such file or directory")
    with Faulty(mode, output, timesteps=3000) as run:
        assert run.wait(90) == 0, run.text
        assert "starting at the beginning" in run.text
    invariants.check(output, mode, starts=1, history={})


@pytest.mark.long
@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_shared_memory_that_is_too_small(mode, tmp_path):
    """The size of /dev/shm limits nothing: shared memory has no name there."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    small = 'mount -t tmpfs -o size=16k tmpfs /dev/shm && exec "$@"'
    with Faulty(mode, tmp_path / "run", 3000, (), prefix=("unshare", "--mount", "sh", "-c", small, "sh")) as run:
        assert run.wait(90) == 0, run.text
    invariants.check(tmp_path / "run", mode, starts=1, history={})


@pytest.mark.long
@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_a_clock_that_jumps(mode, tmp_path):
    """By days, forwards and backwards: nothing but the dates of events depends on it."""
    began = time.monotonic()
    environ = {"RLCB_FAULT": json.dumps({"kind": "clock"})}
    with Faulty(mode, tmp_path / "run", 10_000_000, ("--duration", 3 / 3600), environ) as run:
        assert run.wait(90) == 0, run.text
    invariants.check(tmp_path / "run", mode, starts=1, history={})
    summary = json.loads((tmp_path / "run" / "training_summary.json").read_text())
    assert 2.5 < summary["duration_hours"] * 3600 < time.monotonic() - began
