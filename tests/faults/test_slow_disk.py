"""A disk that stalls: it holds up neither training nor other machines, and a run that waits for it says so."""

import json
import threading
import time
from pathlib import Path

import pytest
from harness import Faulty, Mode

from rl_cluster_benchmark.core.errors import TrainingFailedError
from rl_cluster_benchmark.run.saver import Saver


def stall(file, seconds):
    return {"RLCB_FAULT": json.dumps({"kind": "slow_disk", "file": file, "seconds": seconds})}


def summary(output):
    return json.loads((output / "training_summary.json").read_text())


def test_machines_do_not_lose_each_other_while_the_head_writes(tmp_path):
    """For longer than cluster.timeout, in the middle of training and at its end."""
    output = tmp_path / "run"
    more = ("--set", "cluster.timeout=5", "--set", "training.save_interval=5")
    with Faulty(Mode("a3c", "distributed"), output, 20_000, more, stall("_distributed_step_", 8)) as run:
        assert run.wait(150) == 0, run.text
        assert "the disk stalls" in run.text
        assert not run.leftovers()
    assert summary(output)["state"] == "finished"
    assert summary(output)["total_timesteps"] >= 20_000


def test_the_watchdog_names_the_file_that_the_disk_does_not_take(tmp_path):
    """Training goes on meanwhile, and the last checkpoint is waited for as long as for anything that hangs."""
    output = tmp_path / "run"
    more = ("--set", "training.watchdog=2", "--set", "training.save_interval=5")
    with Faulty(Mode("ppo", "sequential"), output, 20_000, more, stall("_sequential_step_", 600)) as run:
        assert run.wait(150) == 1, run.text
        assert "it waits for the disk to take" in run.text
        assert "Warning: the disk has not taken" in run.text
        assert run.num_lines() >= 30, "it was held up"


def test_of_states_that_wait_the_newest_is_saved():
    written, is_free, saver = [], threading.Event(), Saver()

    def save(name, *, waits=False, fails=False):
        def write():
            if waits:
                is_free.wait(60)
            if fails:
                raise TrainingFailedError("the disk is full")
            written.append(name)

        saver.save(Path(name), write)

    save("first")
    assert written == ["first"], "a disk that is quick takes it at once"
    began = time.monotonic()
    save("second", waits=True)
    for name in ("third", "fourth"):
        save(name)
    assert time.monotonic() - began < 20
    assert saver.path == Path("second")
    is_free.set()
    saver.wait()
    assert written == ["first", "second", "fourth"]
    with pytest.raises(TrainingFailedError, match="full"):
        save("fifth", fails=True)
    with pytest.raises(TrainingFailedError, match="full"):
        saver.check()
