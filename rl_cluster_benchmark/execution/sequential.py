"""Training in one process, which does everything."""

from __future__ import annotations

from rl_cluster_benchmark.execution.loop import Worker, learn
from rl_cluster_benchmark.learning.reduction import Alone
from rl_cluster_benchmark.profiling.attach import attach
from rl_cluster_benchmark.run.run import Run


def train(run: Run) -> None:
    attach(0)
    reduce = Alone()
    env_ids = range(run.config.env.num_envs)
    worker = Worker.build(
        run.config, run.plan, env_ids=env_ids, reduce=reduce, clock=run.clock, incarnation=run.updates,
        checkpoint=run.resumed_from,
    )  # fmt: skip
    learn(worker, run, reduce)
