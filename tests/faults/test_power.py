"""The power fails: whatever the disk had not yet been told to keep is gone."""

import fcntl
import os
import shutil
import struct
import subprocess

import invariants
import pytest
from harness import MODES, Faulty

SHUT_DOWN, AT_ONCE = 0x8004587D, 2  # EXT4_IOC_SHUTDOWN, without writing its journal first

HERE = [
    pytest.param(mode, marks=() if mode.name == "ppo sequential" else pytest.mark.long)
    for mode in MODES
    if mode.mode != "distributed"
]


@pytest.fixture
def disk(tmp_path):
    """An ext4 disk in a file, and a function that mounts it."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("a disk whose power fails needs root and mkfs.ext4")
    with image.open("wb") as file:
        file.truncate(256 << 20)
    folder.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)

    def mount():
        done = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"no disk can be mounted from a file here: {done.stderr.strip()}")

    mount()
    yield folder, mount
    subprocess.run(["umount", "--lazy", folder], check=False)


@pytest.mark.parametrize("mode", HERE, ids=lambda mode: mode.name)
def test_the_power_fails(mode, disk):
    """The run goes on from its newest checkpoint, and of the log up to there no line is missing."""
    folder, mount = disk
    output = folder / "run"
    with Faulty(mode, output, more=("--resume-if-present", "--set", "training.save_interval=20")) as run:
        run.wait_for_updates(60)
        root = os.open(folder, os.O_RDONLY)
        fcntl.ioctl(root, SHUT_DOWN, struct.pack("I", AT_ONCE))
        os.close(root)
        run.kill()
    subprocess.run(["umount", folder], check=True)
    mount()
    history = {}
    steps = invariants.check_newest(output, history)
    assert steps > 0
    with Faulty(mode, output, timesteps=steps + 3000) as run:
        assert run.wait(90) == 0, run.text
        assert "Resumed from" in run.text
    invariants.check(output, mode, starts=2, history=history)
