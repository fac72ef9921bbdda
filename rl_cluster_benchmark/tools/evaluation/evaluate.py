"""Play whole episodes with a trained agent and say how well it did."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import Config, EnvConfig
from rl_cluster_benchmark.config.traits import LABELS
from rl_cluster_benchmark.core.atomic_files import as_json, read_object
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.output_files import check_output, write_output
from rl_cluster_benchmark.core.seeding import stream
from rl_cluster_benchmark.core.text import timestamp
from rl_cluster_benchmark.env.environments import Levels, VectorEnv, make_env
from rl_cluster_benchmark.env.published import normalized_score
from rl_cluster_benchmark.execution.loop import load_weights
from rl_cluster_benchmark.machine import detection, planning, process
from rl_cluster_benchmark.nets.models import make_model
from rl_cluster_benchmark.run import checkpoint, provenance
from rl_cluster_benchmark.run.directory import RunDirectory
from rl_cluster_benchmark.tools.evaluation.video import Screen, clip_mark, open_screen

Policy = Callable[[NDArray], NDArray[np.float32]]
"""Observations [B, ...] -> action logits [B, A]."""

MAX_ENVS = 128
EVALUATION = 2**31  # the incarnation of environments that are evaluated on: no training run has it
NOT_PLAYED_WITH = {
    "env.seed": "--seed says which levels and actions are drawn",
    "env.num_envs": "episodes are played side by side, as many as --num-episodes allows",
}
CHECKPOINT_NAME = re.compile(r"([a-z0-9]+_[a-z]+)_(?:final|step_[0-9]+)\.pt")
LEVEL_NAMES = {"train": "the training levels", "test": "levels never trained on", "all": "all levels"}


@dataclass(frozen=True)
class Result:
    mean_reward: float
    std_reward: float
    min_reward: float
    max_reward: float
    mean_length: float
    std_length: float
    num_episodes: int
    ci95: tuple[float, float]  # of the mean reward
    normalized_score: float | None
    levels: str
    seed: int
    deterministic: bool
    env: str
    precision: str
    engine: str


@dataclass(frozen=True)
class EvaluationSettings:
    """What `rlcb evaluate` is asked for, under the names of its arguments."""

    checkpoint: Path | None  # None: the newest one there is
    algorithm: str | None
    num_episodes: int
    deterministic: bool
    random: bool  # play at random in the agent's place
    seed: int
    levels: Levels
    num_threads: int
    json: Path | None
    video: Path | None
    render: bool
    overrides: Mapping[str, object]  # of the config


def evaluate_checkpoint(asked: EvaluationSettings) -> int:
    """Print the results of a checkpoint (`rlcb evaluate`); return the exit status."""
    if asked.random and asked.deterministic:
        raise UserError("--random and --deterministic exclude each other: a random policy has no likeliest action.")
    screen = open_screen(asked.video, asked.render)
    path = asked.checkpoint or _newest_checkpoint(asked.algorithm)
    for option, file in (("--json", asked.json), ("--video", asked.video)):
        if file is not None:
            check_output(option, file, [path])
    if asked.json is not None:
        _check_json(asked.json)
    data = checkpoint.read(path)
    state = checkpoint.parse(data, path)
    config = _config_of(state, asked)
    name = config.traits.label
    process.check_device(config.hardware.device)
    levels = levels_to_play(config.env, asked.levels)
    where = level_text(levels, config.env, EnvConfig.model_validate(state["config"]["env"]))
    origin = _origin(path, checkpoint.digest_at_end(data), state, config, asked.random)
    print("\n".join(_header(name, config, state, path, where)), flush=True)
    if levels != asked.levels and config.env.game is not None:
        print(f"--levels {asked.levels}: with env.num_levels 0 no level is held back from training; played: {where}.")
    result = evaluate(
        config, None if asked.random else state, num_episodes=asked.num_episodes, deterministic=asked.deterministic,
        levels=levels, seed=asked.seed, screen=screen,
    )  # fmt: skip
    print("\n".join(block(f"{'Random Policy' if asked.random else name} Evaluation Results", result, where)))
    if screen is not None:
        screen.close(clip_mark(origin["checkpoint"]["digest"], origin["policy"]))
    if asked.json is not None:
        write_output(asked.json, as_json(asdict(result) | {"origin": origin}))
        print(f"Saved {asked.json}")
    return 0


def levels_to_play(env: EnvConfig, levels: Levels) -> Levels:
    """Return `all` where no level is held back from training: of all levels none is unseen, and all are of training."""
    return levels if env.game is not None and env.num_levels > 0 else "all"


def level_text(levels: Levels, env: EnvConfig, trained_on: EnvConfig) -> str:
    """Return the levels in words; `trained on` is said of the levels that the agent itself was trained on alone."""
    task = ("name", "distribution_mode", "num_levels", "start_level")
    if env.distribution_mode == "exploration":
        return "the single level of exploration mode"
    if levels == "all" or all(getattr(env, key) == getattr(trained_on, key) for key in task):
        return LEVEL_NAMES[levels]
    end = env.start_level + env.num_levels
    played = f"from {env.start_level} to {end - 1}" if levels == "train" else f"from {end} on"
    return f"levels {played} (the agent was trained on {_training_levels(trained_on)})"


def _training_levels(env: EnvConfig) -> str:
    if env.game is None:
        return env.name
    levels = f"levels {env.start_level} to {env.start_level + env.num_levels - 1}" if env.num_levels else "all levels"
    return f"{levels} of {env.game}, {env.distribution_mode}"


def _origin(path: Path, digest: str | None, state: dict[str, Any], config: Config, at_random: bool) -> dict[str, Any]:
    """Return what the result is of: readers take it for a run's own only if it is of that run's last checkpoint."""
    progress = state["progress"]
    return {
        "policy": "random" if at_random else "trained",
        "checkpoint": {"file": str(path), "digest": digest, "steps": progress["steps"]},
        "run_id": progress.get("run_id"),
        "algorithm": config.algorithm,
        "mode": config.mode,
        "env": config.env.model_dump(exclude={key.removeprefix("env.") for key in NOT_PLAYED_WITH}),
        "cpu_model": detection.detect().cpu_model,
        "evaluated_at": timestamp(),
        **provenance.code(),
    }


def _check_json(file: Path) -> None:
    """Refuse, before any episode is played, an existing file that is no evaluation."""
    if file.is_file() and "mean_reward" not in (read_object(file) or {}):
        raise UserError(f"--json {file}: there is a file already that is no evaluation; choose another name.")


def evaluate(
    config: Config,
    state: dict[str, Any] | None,
    *,
    num_episodes: int,
    deterministic: bool = False,
    levels: Levels = "test",
    seed: int = 0,
    screen: Screen | None = None,
) -> Result:
    """Play with the agent of a checkpoint's state, or with None with a policy that picks actions at random."""
    plan = _plan(config)
    num_envs = min(num_episodes, MAX_ENVS)
    env_config = config.env.model_copy(update={"seed": seed})
    env = make_env(
        env_config,
        range(num_envs),
        num_threads=planning.plan(config).num_threads,
        levels=levels,
        incarnation=EVALUATION,
    )
    policy = random_policy(env) if state is None else trained_policy(config, state, env, plan)
    rewards, lengths = play(policy, env, num_episodes, seed=seed, deterministic=deterministic, screen=screen)
    mean = float(rewards.mean())
    return Result(
        mean_reward=mean,
        std_reward=float(rewards.std()),
        min_reward=float(rewards.min()),
        max_reward=float(rewards.max()),
        mean_length=float(lengths.mean()),
        std_length=float(lengths.std()),
        num_episodes=num_episodes,
        ci95=confidence_interval(rewards),
        normalized_score=normalized_score(config.env, mean),
        levels=levels,
        seed=seed,
        deterministic=deterministic,
        env=config.env.name,
        precision=plan.precision,
        engine=plan.engine,
    )


def _plan(config: Config) -> planning.Plan:
    """Return one thread for a network in C, which then acts faster than with a few of torch's."""
    on_one_thread = configs.with_changes(config, {"hardware.num_threads": 1}, source="evaluation")
    plan = planning.compiled(config, planning.plan(on_one_thread))
    return plan if plan.engine == "native" else planning.compiled(config, planning.plan(config))


def trained_policy(config: Config, state: dict[str, Any], env: VectorEnv, plan: planning.Plan) -> Policy:
    _check_fits(state, env, config)
    precision = process.dtype(plan.precision)
    model = make_model(config.model, env.observation_shape, env.num_actions, config.hardware, precision, plan.engine)
    load_weights(model, state)

    @torch.inference_mode()
    def policy(observations: NDArray) -> NDArray[np.float32]:
        logits, _ = model(torch.from_numpy(observations).to(config.hardware.device))
        return logits.cpu().numpy()

    return policy


def random_policy(env: VectorEnv) -> Policy:
    return lambda observations: np.zeros((len(observations), env.num_actions), dtype=np.float32)


def play(
    policy: Policy,
    env: VectorEnv,
    num_episodes: int,
    *,
    seed: int,
    deterministic: bool,
    screen: Screen | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Play exactly `num_episodes` episodes; return their (rewards, lengths).

    Each environment plays a number of episodes fixed beforehand. Taking the first that end would favour short ones.
    """
    noise = stream(seed, "evaluate")
    to_play = np.full(env.num_envs, num_episodes // env.num_envs)
    to_play[: num_episodes % env.num_envs] += 1
    reward, length = np.zeros(env.num_envs), np.zeros(env.num_envs, dtype=int)
    just_ended = np.zeros(env.num_envs, dtype=bool)
    rewards: list[float] = []
    lengths: list[int] = []
    observations = env.reset()
    shown = observations.copy()  # an environment that has played its episodes stays on its last frame
    if screen is not None:
        screen(shown)
    with tqdm(total=num_episodes, desc="Evaluating", disable=None if sys.stderr else True, file=sys.stderr) as bar:
        while to_play.any():
            active = to_play > 0
            playing = np.flatnonzero(active & ~just_ended)
            actions = np.zeros(env.num_envs, dtype=np.int32)
            gumbel = -np.log(noise.standard_exponential((env.num_envs, env.num_actions)))
            if len(playing):
                logits = policy(observations[playing])
                actions[playing] = (logits if deterministic else logits + gumbel[playing]).argmax(-1)
            observations, step_rewards, terminated, truncated = env.step(actions)
            if screen is not None:
                shown[active] = observations[active]
                screen(shown)
            reward[playing] += step_rewards[playing]
            length[playing] += 1
            just_ended = terminated | truncated
            for i in np.flatnonzero(just_ended & active):
                rewards.append(float(reward[i]))
                lengths.append(int(length[i]))
                reward[i], length[i] = 0.0, 0
                to_play[i] -= 1
                bar.update()
    return np.array(rewards), np.array(lengths)


def confidence_interval(samples: NDArray[np.float64], resamples: int = 10_000) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the mean."""
    generator = np.random.default_rng(0)
    means = [generator.choice(samples, size=len(samples)).mean() for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def block(title: str, result: Result, where: str) -> list[str]:
    line = "=" * 60
    rows = [
        "",
        line,
        title,
        line,
        f"Episodes: {result.num_episodes}",
        f"Levels: {where}",
        f"Mean Reward: {result.mean_reward:.2f} ± {result.std_reward:.2f}",
        f"95% Interval of the Mean: {result.ci95[0]:.2f} to {result.ci95[1]:.2f}",
        f"Min/Max Reward: {result.min_reward:.2f} / {result.max_reward:.2f}",
        f"Mean Episode Length: {result.mean_length:.2f} ± {result.std_length:.2f}",
    ]
    if result.normalized_score is not None:
        rows.append(f"Normalized Score: {result.normalized_score:.3f}")
    return [*rows, line]


def _header(name: str, config: Config, state: dict[str, Any], path: Path, where: str) -> list[str]:
    line, shape = "=" * 60, state["observation_shape"]
    return [
        line,
        f"Evaluating {name} Agent",
        line,
        f"Environment: {config.env.name}",
        f"Levels: {where}",
        f"Observation shape: {tuple([shape[-1], *shape[:-1]] if len(shape) == 3 else shape)}",
        f"Number of actions: {state['num_actions']}",
        f"Device: {config.hardware.device}",
        f"Checkpoint: {path}",
        f"Algorithm: {name}",
        "-" * 60,
        f"✓ Loaded checkpoint from: {path} ({state['progress']['steps']:,} steps)",
        "",
    ]


def _config_of(state: dict[str, Any], asked: EvaluationSettings) -> Config:
    data = dict(state["config"])
    if asked.algorithm not in (None, data["algorithm"]):
        raise UserError(
            f"The checkpoint was trained with {data['algorithm']}, not {asked.algorithm}; leave --algorithm out."
        )
    for key in map(configs.home_of, asked.overrides):
        if key in NOT_PLAYED_WITH:
            raise UserError(f"--set {key} has no effect on an evaluation; {NOT_PLAYED_WITH[key]}.")
        if not key.startswith(("env.", "hardware.", "model.")):
            raise UserError(f"--set {key} has no effect on an evaluation; keys of env and hardware have.")
    changes: dict[str, object] = {"hardware.num_threads": asked.num_threads, **asked.overrides}
    if data["hardware"]["device"] != "cpu" and not torch.cuda.is_available():
        changes.setdefault("hardware.device", "cpu")
    return configs.build(data, changes, source="checkpoint")


def _check_fits(state: dict[str, Any], env: VectorEnv, config: Config) -> None:
    if list(env.observation_shape) != list(state["observation_shape"]) or env.num_actions != state["num_actions"]:
        raise UserError(
            f"The agent expects observations {tuple(state['observation_shape'])} and {state['num_actions']} actions, "
            f"but {config.env.name} has {env.observation_shape} and {env.num_actions}; it was trained on "
            f"{state['config']['env']['name']}."
        )


def _newest_checkpoint(algorithm: str | None) -> Path:
    """Find the newest checkpoint, of this algorithm if one is given: files are named after it."""
    places = ("checkpoints", "runs", "benchmarks")
    pattern = f"{algorithm}_*.pt" if algorithm in LABELS else "*.pt"
    found = [file for place in places for file in Path(place).rglob(pattern) if file.is_file()]
    if not found:
        of = f"{LABELS[algorithm]} " if algorithm in LABELS else ""
        raise UserError(f"No {of}checkpoint under ./checkpoints, ./runs or ./benchmarks; give one with --checkpoint.")
    return _last_of_its_run(max(found, key=lambda file: file.stat().st_mtime))


def _last_of_its_run(file: Path) -> Path:
    """Return the checkpoint of this file's run that has most steps: dates of copied files say nothing."""
    folder, name = file.parent, CHECKPOINT_NAME.fullmatch(file.name)
    if name is None:
        return file
    run = RunDirectory(folder, folder, folder, name[1])
    last = [path for path in (run.final_checkpoint(), *run.step_checkpoints()[:1]) if path.exists()]
    if len(last) < 2:
        return last[0] if last else file
    return max(last, key=lambda path: checkpoint.load(path)["progress"]["steps"])
