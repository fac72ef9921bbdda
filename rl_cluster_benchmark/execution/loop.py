"""The loop that every worker runs, alone or as one of many: collect a rollout, learn from it, again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl_cluster_benchmark.algorithms.on_policy import nothing_learned
from rl_cluster_benchmark.algorithms.registry import ALGORITHMS, LearningAlgorithm
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.seeding import integer_seed
from rl_cluster_benchmark.core.timing import PhaseClock
from rl_cluster_benchmark.env.environments import make_env
from rl_cluster_benchmark.experience.rollout import Collector, Episode, Rollout, RolloutHelper, count_bad
from rl_cluster_benchmark.learning.learner import Alone
from rl_cluster_benchmark.learning.losses import left_out
from rl_cluster_benchmark.learning.reduction import Reducer, Sharing
from rl_cluster_benchmark.machine import process
from rl_cluster_benchmark.machine.planning import Plan
from rl_cluster_benchmark.nets.models import ActorCritic, make_model
from rl_cluster_benchmark.run.run import Run


class Course(Protocol):
    """How far the run is, and what to do after each update."""

    clock: PhaseClock
    updates: int

    @property
    def fraction(self) -> float: ...

    def is_complete(self) -> bool: ...

    def should_stop(self) -> bool: ...

    def interrupted(self) -> bool: ...

    def start(self) -> None: ...

    def record(self, steps: int, episodes: Sequence[Episode], losses: dict[str, float]) -> None: ...

    def checkpoint_due(self) -> bool: ...

    def save(self, state: dict[str, Any]) -> None: ...

    def finish(self, state: Callable[[], dict[str, Any]]) -> None: ...


class SharesExperience(Sharing, Protocol):
    """Workers that also collect into memory which all of them can read, and help each other with that."""

    def rollout(self) -> Rollout: ...

    def helping(self, model: ActorCritic, clock: PhaseClock) -> RolloutHelper | None: ...


@dataclass
class Worker:
    """Some of the run's environments, a copy of the model, and the algorithm that updates it."""

    config: Config
    model: ActorCritic
    algorithm: LearningAlgorithm
    collector: Collector

    @classmethod
    def build(
        cls, config: Config, plan: Plan, *, env_ids: Sequence[int], reduce: Reducer, clock: PhaseClock,
        incarnation: int, checkpoint: dict[str, Any] | None, sharing: SharesExperience | None = None,
    ) -> Worker:  # fmt: skip
        env = make_env(config.env, env_ids, num_threads=plan.num_threads, incarnation=incarnation)
        model, algorithm = build_algorithm(
            config, plan, env.observation_shape, env.num_actions, env_ids=env_ids, reduce=reduce, checkpoint=checkpoint,
            sharing=sharing,
        )  # fmt: skip
        collector = Collector(
            env,
            model,
            n_steps=config.training.n_steps,
            env_ids=env_ids,
            seed=config.env.seed,
            device=config.hardware.device,
            clock=clock,
            time_limit=config.training.time_limit,
            rollout=sharing.rollout() if sharing is not None else None,
            helping=sharing.helping(model, clock) if sharing is not None else None,
        )
        return cls(config, model, algorithm, collector)

    @classmethod
    def of(cls, run: Run) -> Worker:
        """Build the worker of a run in one process, which has all environments."""
        return cls.build(
            run.config, run.plan, env_ids=range(run.config.env.num_envs), reduce=Alone(), clock=run.clock,
            incarnation=run.updates, checkpoint=run.resumed_from,
        )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        env = self.collector.env
        return state_of(self.model, self.algorithm, env.observation_shape, env.num_actions)


def build_algorithm(
    config: Config, plan: Plan, observation_shape: Sequence[int], num_actions: int, *, env_ids: Sequence[int],
    reduce: Reducer, checkpoint: dict[str, Any] | None, sharing: SharesExperience | None = None,
) -> tuple[ActorCritic, LearningAlgorithm]:  # fmt: skip
    """The model as the run's seed or the checkpoint has it, and the algorithm that updates it."""
    torch.manual_seed(integer_seed(config.env.seed, "model"))
    precision = process.dtype(plan.precision)
    model = make_model(config.model, observation_shape, num_actions, config.hardware, precision, plan.engine)
    algorithm = ALGORITHMS[config.algorithm](
        config, model, env_ids=env_ids, micro_batch=plan.micro_batch, reduce=reduce, sharing=sharing
    )
    if checkpoint is not None:
        load_weights(model, checkpoint)
        load_optimizer(algorithm, checkpoint)
    return model, algorithm


def state_of(
    model: ActorCritic, algorithm: LearningAlgorithm, observation_shape: Sequence[int], num_actions: int
) -> dict[str, Any]:
    """What a checkpoint needs of a learner."""
    return {
        "model": {name: tensor.cpu().contiguous().clone() for name, tensor in model.state_dict().items()},
        "algorithm": algorithm.state_dict(),
        "observation_shape": list(observation_shape),
        "num_actions": num_actions,
    }


def learn(worker: Worker, course: Course, reduce: Reducer, fetch: Callable[[], None] = lambda: None) -> None:
    """Collect a rollout and learn from it, until the course is complete.

    `fetch` brings the model up to date before it acts and before it is saved, where others change the parameters.
    """

    def state() -> dict[str, Any]:
        fetch()
        return worker.state()

    training = worker.config.training
    course.start()
    while not course.is_complete():
        fetch()
        rollout = worker.collector.collect(course.updates, course.should_stop)
        here = [float(rollout is None), *count_bad(rollout)]
        stops, is_bad, *bad = reduce(torch.tensor(here, dtype=torch.float64)).tolist()  # the same on all workers
        if stops or rollout is None:
            break
        if is_bad:
            losses = nothing_learned(training, course.fraction) | left_out(bad, training.on_nan)
        else:
            with course.clock.phase("update"):
                losses = worker.algorithm.update(
                    rollout, index=course.updates, progress=course.fraction, interrupted=course.interrupted
                )
        course.record(rollout.num_steps, rollout.episodes, losses)
        if course.checkpoint_due():
            course.save(state())
    course.finish(state)


def load_weights(model: ActorCritic, checkpoint: dict[str, Any]) -> None:
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError:
        raise UserError(
            "The checkpoint's weights do not fit this network; leave model.* and the environment as they were in "
            f"training (model: {checkpoint['config']['model']}, env: {checkpoint['config']['env']['name']})."
        ) from None


def load_optimizer(algorithm: LearningAlgorithm, checkpoint: dict[str, Any]) -> None:
    try:
        algorithm.load_state_dict(checkpoint["algorithm"])
    except (RuntimeError, KeyError):
        raise UserError(
            "The checkpoint's optimiser state does not fit: leave training.optimizer as it was "
            f"({checkpoint['config']['training']['optimizer']})."
        ) from None
