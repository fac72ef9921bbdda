"""Found by every Python process of a run whose PYTHONPATH begins here: environments that fail as RLCB_FAULT says.

{"kind": "nan_reward", "process": "rlcb-worker-1", "after": 100, "count": 3}: steps 100 to 102 of that process (of any,
if none is named) give a NaN reward. Other kinds: inf_observation, raise, hang, eat (memory), no_environments.
"""

import json
import multiprocessing
import os
import sys
import time

FAULT = json.loads(os.environ.get("RLCB_FAULT", "{}"))


class BrokenGameError(Exception):
    pass


def fail(step, calls):
    """What a step gives, or does, instead."""
    kind = FAULT["kind"]
    if kind == "raise":
        raise BrokenGameError("the game fell over")
    if kind == "hang":
        while True:
            time.sleep(60)
    if kind == "eat":
        EATEN.append(bytearray(64 << 20))
    if kind == "nan_reward":
        step.rewards[0] = float("nan")
    if kind == "inf_observation":
        step.observations[0] = float("inf")
    return step


EATEN: list[bytearray] = []


class Finder:
    """Patches the environments when they are imported, not before: thread counts have to be set first."""

    def find_spec(self, name, path=None, target=None):
        if name != "rl_cluster_benchmark.env.environments":
            return None
        sys.meta_path.remove(self)
        import importlib.util

        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            if FAULT["kind"] == "no_environments":
                no_environments(module)
            else:
                patch(module.EnvPoolEnv)

        spec.loader.exec_module = exec_module
        return spec


def patch(env):
    real = env.step
    calls = 0

    def step(self, actions):
        nonlocal calls
        calls += 1
        result = real(self, actions)
        after, count = FAULT.get("after", 1), FAULT.get("count", 10**9)
        here = FAULT.get("process") in (None, multiprocessing.current_process().name)
        return fail(result, calls) if here and after <= calls < after + count else result

    env.step = step


def jump():
    """The clock of the day, days ahead and days behind in turn, or, once the file is there, a day behind.

    What measures durations is left alone.
    """
    real, calls = time.time, 0

    def jumping():
        nonlocal calls
        calls += 1
        if "file" in FAULT:
            return real() - 86_400 * os.path.exists(FAULT["file"])
        return real() + 86_400 * (calls % 7 - 3)

    time.time = jumping


def slow_disk():
    """The disk takes its time, `seconds`, for the first file with `file` in its name."""
    real, left = os.fsync, [FAULT["seconds"]]

    def fsync(descriptor):
        if left and FAULT["file"] in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.write(2, b"the disk stalls\n")
            time.sleep(left.pop())
        real(descriptor)

    os.fsync = fsync


def no_environments(module):
    """EnvPool has no thread to start, once, when the file is there."""
    load = module.load_envpool

    class EnvPool:
        @staticmethod
        def make(*args, **options):
            if os.path.exists(FAULT["file"]):
                os.unlink(FAULT["file"])
                raise RuntimeError("Resource temporarily unavailable")
            return load().make(*args, **options)

    module.load_envpool = lambda: EnvPool


if FAULT.get("kind") == "clock":
    jump()
elif FAULT.get("kind") == "slow_disk":
    slow_disk()
elif FAULT:
    sys.meta_path.insert(0, Finder())
