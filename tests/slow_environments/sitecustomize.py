"""On the Python path of a run, this makes its environments slow: every step sleeps, in every process of the run."""

import importlib.abc
import importlib.util
import os
import sys
import time

MODULE = "rl_cluster_benchmark.env.environments"


class SlowEnvironments(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_and_slow_down(module):
            load(module)
            step = module.EnvPoolEnv.step

            def slow_step(env, actions):
                time.sleep(float(os.environ["SECONDS_PER_STEP"]))
                return step(env, actions)

            module.EnvPoolEnv.step = slow_step

        spec.loader.exec_module = load_and_slow_down
        return spec


sys.meta_path.insert(0, SlowEnvironments())
