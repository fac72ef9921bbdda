"""The typed config of a run, documented field by field. config_files.py reads and writes it.

This module imports neither numpy nor torch, so that thread counts can be set from it before those libraries start.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rl_cluster_benchmark.config.traits import TRAITS, Traits, is_distributed, is_parallel, is_sequential

Algorithm = Literal["ppo", "a2c", "a3c", "impala"]
Mode = Literal["sequential", "parallel", "distributed"]
DistributionMode = Literal["easy", "hard", "extreme", "memory", "exploration"]

PROCGEN_GAMES = (
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot",
    "heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
)  # fmt: skip
TOY_ENVS = ("CartPole-v1", "Catch-v0")
# The games that have a distribution mode besides easy and hard, which all games have.
EXTRA_DISTRIBUTION_MODES: dict[str, frozenset[str]] = {
    "extreme": frozenset({"chaser", "dodgeball", "leaper", "starpilot"}),
    "memory": frozenset({"caveflyer", "dodgeball", "heist", "jumper", "maze", "miner"}),
    "exploration": frozenset({"caveflyer", "climber", "coinrun", "heist", "jumper", "leaper", "maze", "ninja"}),
}
MAX_LEVEL = 2**31 - 1
MAX_INT = 2**63 - 1
MAX_FLOAT = 1e38  # just below the largest float32, in which networks compute
MAX_SECONDS = 1_000_000  # the longest timeout: system calls refuse those of many years
MAX_HOURS = 1_000_000  # the longest run
MAX_ENVS, MAX_THREADS, MAX_WIDTH = 65_536, 1024, 65_536


def canonical_env_name(name: object) -> object:
    """Return the full name of an environment: `procgen-coinrun-v0` for `coinrun` or `procgen:procgen-coinrun-v0`."""
    if not isinstance(name, str):
        return name
    game = name.removeprefix("procgen:").removeprefix("procgen-").removesuffix("-v0").lower()
    if game in PROCGEN_GAMES:
        return f"procgen-{game}-v0"
    if name in TOY_ENVS:
        return name
    known = [*PROCGEN_GAMES, *TOY_ENVS]
    near = difflib.get_close_matches(game, known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"is not a known environment; {hint}Known: {', '.join(known)}")


EnvName = Annotated[str, BeforeValidator(canonical_env_name)]


def _number(value: object) -> object:
    """Return the number in a string such as `3e-4`, which YAML 1.1 does not read as a number."""
    if isinstance(value, bool):
        raise ValueError("is not allowed; it must be a number")
    if isinstance(value, str):
        try:
            return float(value.replace("_", ""))
        except ValueError:
            return value
    return value


def _whole(value: object) -> object:
    """Return a whole number; read a text of digits exactly, because a float would round it beyond 2^53."""
    try:
        number = int(value) if isinstance(value, str) else _number(value)
    except ValueError:
        number = _number(value)
    number = int(number) if isinstance(number, float) and number.is_integer() else number
    if isinstance(number, int) and abs(number) > MAX_INT:
        raise ValueError("is not allowed; it must be less than 2^63")
    return number


def _fits_float32(number: float) -> float:
    if abs(number) > MAX_FLOAT:
        raise ValueError(f"is not allowed; it must be at most {MAX_FLOAT:g}")
    return number


Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False), AfterValidator(_fits_float32)]
Int = Annotated[int, BeforeValidator(_whole), Field(strict=True)]


def _count_or_auto(value: object) -> object:
    number = _whole(value)
    if number not in (None, "auto") and not (type(number) is int and 1 <= number <= MAX_THREADS):
        raise ValueError(f"is not allowed; it must be auto or a whole number from 1 to {MAX_THREADS}")
    return number


Count = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]
AutoCount = Annotated[Count, BeforeValidator(lambda value: "auto" if value is None else value)]

# Marks a key that may be different when a run is resumed: how it runs, where its files are, and when it ends. Every key
# without it is part of what is learned, and stays (see run/resumption.py).
MAY_CHANGE = "may change on --resume"
Value = TypeVar("Value")
MayChange = Annotated[Value, MAY_CHANGE]


@dataclass(frozen=True)
class UsedBy:
    """Mark a key that only these algorithms use."""

    algorithms: tuple[Algorithm, ...]


OfPPO = Annotated[Value, UsedBy(("ppo",))]
OfActorCritics = Annotated[Value, UsedBy(("ppo", "a2c", "a3c"))]  # IMPALA has keys of its own for these


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_assignment=True)


class EnvConfig(Section):
    """Which game, which levels, how many copies."""

    name: EnvName = Field(
        "procgen-coinrun-v0",
        description="A Procgen game (`coinrun`, `procgen-coinrun-v0` and `procgen:procgen-coinrun-v0` are the same), "
        "or `CartPole-v1` or `Catch-v0` for quick checks.",
    )
    num_envs: Int = Field(32, ge=1, le=MAX_ENVS, description="Environments stepped together in sequential mode.")
    seed: Int = Field(
        42, ge=0, le=2**32 - 1, description="The run's seed; every env, worker and shuffle derives its own."
    )
    distribution_mode: DistributionMode = Field(
        "easy", description="Procgen's difficulty. All games know easy and hard."
    )
    num_levels: Int = Field(
        200,
        ge=0,
        le=MAX_LEVEL,
        description="Procgen: size of the training set of levels; 0 is all levels, so none stays unseen.",
    )
    start_level: Int = Field(
        0, ge=0, le=MAX_LEVEL, description="Procgen: first level of the training set; not used with num_levels = 0."
    )
    use_sequential_levels: bool = Field(
        False,
        description="Only false: EnvPool's Procgen takes true, and still ends every episode at the end of its level.",
    )
    center_agent: bool = Field(
        True, description="Procgen: centre the view on the agent, in games whose levels are larger than the view."
    )
    use_backgrounds: bool = Field(True, description="Procgen: draw backgrounds; false is plain black.")
    use_monochrome_assets: bool = Field(False, description="Procgen: draw plain rectangles instead of sprites.")
    restrict_themes: bool = Field(
        False,
        description="Procgen: use a single theme where a game has several (not caveflyer, chaser, heist, maze, "
        "miner and plunder).",
    )
    use_generated_assets: bool = Field(False, description="Procgen: use generated instead of drawn assets.")
    paint_vel_info: bool = Field(
        False,
        description="Procgen: paint the agent's velocity into the corner (not chaser, heist, maze, miner and "
        "plunder, where it has none).",
    )

    @property
    def has_images(self) -> bool:
        """Return whether observations are images; those of toy environments are short vectors."""
        return self.game is not None

    @property
    def game(self) -> str | None:
        """Return the bare name of the Procgen game, or None for a toy environment."""
        return self.name.removeprefix("procgen-").removesuffix("-v0") if self.name.startswith("procgen-") else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        games = EXTRA_DISTRIBUTION_MODES.get(self.distribution_mode)
        if games is not None and self.game is not None and self.game not in games:
            raise ValueError(
                f"distribution_mode {self.distribution_mode} does not exist for {self.game}; "
                f"games that have it: {', '.join(sorted(games))}"
            )
        if self.distribution_mode == "exploration" and self.game is not None and self.num_levels:
            raise ValueError(
                "distribution_mode exploration is a single level, of which none can be held back from training: "
                "it needs env.num_levels = 0"
            )
        if self.use_sequential_levels:
            raise ValueError(
                "env.use_sequential_levels = true does nothing: in EnvPool's Procgen an episode ends with its level; "
                "leave it false"
            )
        if self.start_level + self.num_levels >= MAX_LEVEL:
            raise ValueError(f"start_level + num_levels must be less than {MAX_LEVEL}")
        return self


class ModelConfig(Section):
    """The network that maps observations to action logits and a value."""

    architecture: Literal["auto", "impala", "nature", "mlp"] = Field(
        "auto", description="auto takes impala (the IMPALA-CNN) for images and mlp for vectors; nature is the DQN CNN."
    )
    channels: list[Int] = Field(
        [16, 32, 32], min_length=1, description="Channels of the IMPALA-CNN's stages; each stage halves the image."
    )
    hidden_size: Int = Field(
        256, ge=1, le=MAX_WIDTH, description="Width of the layer before the heads (IMPALA-CNN and Nature-CNN)."
    )
    mlp_sizes: list[Int] = Field([64, 64], min_length=1, description="Hidden layers of the MLP.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not 1 <= size <= MAX_WIDTH for size in [*self.channels, *self.mlp_sizes]):
            raise ValueError(f"channels and mlp_sizes must each be between 1 and {MAX_WIDTH}")
        return self


class TrainingConfig(Section):
    """The learning problem: how much experience, how it is used, when it ends."""

    total_timesteps: MayChange[Int] = Field(25_000_000, ge=1, description="Stop after this many environment steps.")
    duration_hours: MayChange[Float | None] = Field(
        None, gt=0, le=MAX_HOURS, description="Stop after this many hours, if that comes first."
    )
    n_steps: Int = Field(128, ge=1, le=1_000_000, description="Steps each environment takes between two updates.")
    batch_size: Annotated[Int, UsedBy(("ppo", "impala"))] = Field(
        1024,
        ge=1,
        description="Samples in a minibatch. For PPO it must divide num_envs x n_steps; if larger, one minibatch. "
        "IMPALA rounds it to whole unrolls of n_steps.",
    )
    n_epochs: OfPPO[Int] = Field(4, ge=1, le=1_000_000, description="Passes over the experience in each update.")
    learning_rate: Float = Field(3e-4, gt=0, description="Step size of the optimiser.")
    anneal_lr: bool = Field(False, description="Let the learning rate fall linearly to zero over the run.")
    gamma: Float = Field(0.999, ge=0, le=1, description="Discount factor.")
    gae_lambda: OfActorCritics[Float] = Field(
        0.95, ge=0, le=1, description="Lambda of generalised advantage estimation."
    )
    clip_range: OfPPO[Float] = Field(0.2, gt=0, le=1000, description="PPO: the ratio is clipped to 1 +- this.")
    clip_value_loss: OfPPO[bool] = Field(True, description="PPO: clip the change of the value by clip_range too.")
    ent_coef: OfActorCritics[Float] = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    vf_coef: OfActorCritics[Float] = Field(0.5, ge=0, description="Weight of the value loss.")
    max_grad_norm: OfActorCritics[Float] = Field(0.5, gt=0, description="Gradients are scaled down to this norm.")
    target_kl: OfPPO[Float | None] = Field(
        None, gt=0, description="PPO: end an update early once the approximate KL exceeds this; null never does."
    )
    normalize_advantage: OfActorCritics[bool] = Field(
        True, description="Normalise advantages over each (global) minibatch."
    )
    normalize_reward: bool = Field(
        True, description="Divide training rewards by the running std of the discounted return; logs stay raw."
    )
    optimizer: Literal["adam", "rmsprop"] = Field("adam", description="What turns gradients into steps.")
    adam_eps: Float = Field(1e-5, gt=0, description="Epsilon of the optimiser.")
    rmsprop_bias_correction: bool = Field(
        False,
        description="RMSprop: divide the mean square by what it lacks of its weight in the first steps, as Adam does; "
        "without it the first step is ten learning rates long.",
    )
    time_limit: Literal["bootstrap", "terminal"] = Field(
        "bootstrap",
        description="What an episode that is cut off by its game's time limit is worth beyond it: bootstrap adds the "
        "value of its last frame, terminal adds nothing, as in the published Procgen results.",
    )
    on_nan: MayChange[Literal["stop", "skip"]] = Field(
        "stop",
        description="What NaN or infinite rewards, observations, losses or gradients do: stop ends the run with the "
        "reason; skip leaves the update out, counts it, and goes on (100 in a row end the run). Checkpoints never hold "
        "any.",
    )
    watchdog: MayChange[Float] = Field(
        300.0,
        ge=1,
        le=MAX_SECONDS,
        description="Seconds without progress after which a process counts as hung: its Python stack is printed and "
        "the run ends, or, of IMPALA, the actor is replaced. Longer than one minibatch or one environment step takes.",
    )
    log_interval: MayChange[Int] = Field(1, ge=1, description="Updates between two lines of metrics.")
    save_interval: MayChange[Int] = Field(
        100, ge=1, description="Updates between two checkpoints (see also checkpoint_minutes)."
    )


class ImpalaConfig(Section):
    """Used by IMPALA only."""

    vtrace_clip_rho_threshold: Float = Field(
        1.0, gt=0, description="Clip of the importance weights in the V-trace target (rho of the paper)."
    )
    vtrace_clip_c_threshold: Float = Field(
        1.0, gt=0, description="Clip of the weights that carry a step's surprise back to earlier ones (c of the paper)."
    )
    vtrace_clip_pg_rho_threshold: Float = Field(1.0, gt=0, description="Clip of the weights in the policy gradient.")
    vtrace_lambda: Float = Field(
        1.0,
        ge=0,
        le=1,
        description="Discount, beside gamma, of what later steps add to V-trace's targets and advantages: below 1 both "
        "vary less and rely more on the value. On policy they are those of generalised advantage estimation.",
    )
    clip_range: Float | None = Field(
        None,
        gt=0,
        le=1000,
        description="Clip the ratio to the policy that acted to 1 +- this in the policy's loss, as PPO does (known as "
        "APPO), in place of vtrace_clip_pg_rho_threshold; null is IMPALA's own loss.",
    )
    normalize_advantage: bool = Field(
        False, description="Normalise advantages by the running mean and deviation of the last twenty or so steps."
    )
    passes: Int = Field(
        1, ge=1, le=1000, description="Steps of the optimiser on each batch; more than one without replay only."
    )
    entropy_coef: Float = Field(0.01, ge=0, description="Weight of the entropy bonus.")
    value_coef: Float = Field(0.5, ge=0, description="Weight of the value loss.")
    loss: Literal["sum", "mean"] = Field(
        "sum",
        description="The loss of a step is the sum over its samples, as in the paper, or their mean. It decides what "
        "max_grad_norm means.",
    )
    max_grad_norm: Float = Field(
        40.0, gt=0, description="Gradients are scaled down to this norm. 40 suits a sum; for a mean, 0.5 is usual."
    )
    num_actors: MayChange[Count | None] = Field(
        None,
        description="Processes that act (on each machine). auto splits the cores by what acting and learning cost; "
        "null is parallel.num_workers, and auto where that is null.",
    )
    num_learners: MayChange[AutoCount] = Field(
        "auto",
        description="Processes that learn (on each machine); auto: as many as actors leave cores. With images, where "
        "that is none, and on two cores: up to two thirds of the cores, which they share with actors.",
    )
    split: MayChange[Literal["given", "measured"]] = Field(
        "given",
        description="Written by the program: measured, where a measurement gave the numbers of actors and learners.",
    )
    pages_per_actor: Int = Field(
        3, ge=2, le=64, description="Unrolls of each environment that there is room for: how far actors may run ahead."
    )
    inference_precision: MayChange[Literal["same", "float32", "bfloat16"]] = Field(
        "same", description="Of the actors alone; V-trace corrects for the difference. same is hardware.precision."
    )
    replay_fraction: Float = Field(
        0.0,
        ge=0,
        le=0.95,
        description="Share of each batch that is learned from again; 0 is no replay. Not in sequential mode.",
    )
    replay_size: Int = Field(
        1000, ge=1, description="Unrolls kept for replay, in a memory-mapped file in the run's directory."
    )
    max_actor_restarts: MayChange[Int] = Field(
        100, ge=0, description="An actor that dies is started anew; more deaths than this end the run."
    )


class ParallelConfig(Section):
    """Parallel mode: worker processes on one machine (for IMPALA, its actors)."""

    num_workers: MayChange[Annotated[Int | None, BeforeValidator(lambda value: None if value == "auto" else value)]] = (
        Field(None, ge=1, le=MAX_THREADS, description="Worker processes; null or auto is one per physical core.")
    )
    num_envs_per_worker: Int | None = Field(
        None,
        ge=1,
        description="Environments of each worker; null shares env.num_envs among the workers. A run that is resumed "
        "with another number of workers keeps the environments that it has in all.",
    )
    reduce: MayChange[Literal["shared_memory", "gloo"]] = Field(
        "shared_memory",
        description="Without effect: the workers of a machine sum through shared memory, also where this says gloo.",
    )
    balance: Annotated[MayChange[Float | None], UsedBy(("ppo", "a2c"))] = Field(
        None,
        ge=0,
        le=0.9,
        description="PPO, A2C: share of each minibatch that goes to whichever worker is free first, so that slow cores "
        "do not hold up fast ones; null is 0.5 for Procgen and 0 for vectors. It changes the rounding of sums alone. "
        "With 0, workers do not help each other with rollouts either.",
    )
    pin: MayChange[Literal["auto", "always", "never"]] = Field(
        "auto",
        description="Pin each worker to a core; auto does when the run has all of the machine's cores. A pinned worker "
        "of PPO or A2C keeps its core busy while it waits.",
    )


class ClusterConfig(Section):
    """Distributed mode: several machines."""

    num_workers: MayChange[Int] = Field(1, ge=1, le=MAX_ENVS, description="Machines that take part, the head included.")
    distributed_backend: MayChange[Literal["gloo"]] = Field(
        "gloo", description="torch.distributed backend; gloo is the one for CPUs."
    )
    master_addr: MayChange[str] = Field("localhost", min_length=1, description="Address of the head machine.")
    master_port: MayChange[Int] = Field(29500, ge=1, le=65535, description="A free port on the head machine.")
    interface: MayChange[str | None] = Field(
        None,
        min_length=1,
        description="Network interface to use (`eth0`); null takes the one on the route to the head.",
    )
    sync: Literal["allreduce", "local_sgd", "async"] = Field(
        "allreduce",
        description="allreduce sums every gradient over all machines (PPO, A2C, IMPALA); local_sgd lets each machine "
        "step alone and averages the parameters every sync_every updates (PPO, A2C); async does so while all go on "
        "(A3C, IMPALA).",
    )
    sync_every: Int = Field(8, ge=1, description="local_sgd, async: updates between two averages.")
    compression: MayChange[Literal["none", "bfloat16"]] = Field(
        "none", description="bfloat16 sends gradients between machines in half the bytes (allreduce only)."
    )
    timeout: MayChange[Float] = Field(
        60.0,
        ge=2,
        le=MAX_SECONDS,
        description="Seconds until a silent machine counts as lost; longer than the slowest rollout takes.",
    )
    join_timeout: MayChange[Float] = Field(
        300.0, ge=2, le=MAX_SECONDS, description="Seconds to wait at the start until all machines are there."
    )
    max_restarts: MayChange[Int] = Field(
        3, ge=0, le=1_000_000, description="How often `rlcb launch` starts the run again after a failure."
    )
    min_nodes: MayChange[Int | None] = Field(
        None, ge=1, description="`rlcb launch` may go on with this many machines when some are lost; null needs all."
    )
    shared_filesystem: MayChange[bool] = Field(
        True,
        description="Check that all machines see the run directory; false if only the head's disk holds it (a restart "
        "then needs the same head).",
    )


class HardwareConfig(Section):
    """How this machine is used. Nothing here changes what is learned, but for rounding."""

    device: MayChange[str] = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d{1,2})?)$", description="cpu, or cuda (sequential mode) where torch has it."
    )
    num_threads: MayChange[Int | None] = Field(
        None,
        ge=1,
        le=MAX_THREADS,
        description="Threads of torch, OpenMP, BLAS and the environments in each process; null is one per physical "
        "core in sequential mode, and one in each worker.",
    )
    precision: MayChange[Literal["auto", "float32", "bfloat16"]] = Field(
        "auto",
        description="auto is float32 where the network is computed in C (`engine`), but on CPUs with AMX, in processes "
        "of one thread, what is measured to be faster; in torch it is bfloat16 where the CPU has AMX or AVX512-BF16, "
        "and float32 elsewhere.",
    )
    memory_format: MayChange[Literal["channels_last", "contiguous"]] = Field(
        "channels_last", description="Layout of images and convolutions; contiguous is kept for comparison."
    )
    engine: MayChange[Literal["auto", "native", "torch"]] = Field(
        "auto",
        description="What computes the IMPALA-CNN or the Nature-CNN: native is this package's C code, in float32, or, "
        "on CPUs with AMX and in processes of one thread, in bfloat16; auto is native where that code suits network "
        "and precision and was built or can be compiled, else torch.",
    )
    micro_batch: MayChange[Int | None] = Field(
        None, ge=1, description="Samples per backward pass, gradients added up to the minibatch; null fits the cache."
    )


class LoggingConfig(Section):
    """Where a run writes without `--output-dir`, and how often it saves."""

    checkpoint_dir: MayChange[str | None] = Field(
        None, min_length=1, description="null is `./checkpoints/<algorithm>_<mode>`."
    )
    log_dir: MayChange[str] = Field("./logs", min_length=1, description="Logs go to `<log_dir>/<ALGORITHM>_<Mode>/`.")
    tensorboard: MayChange[bool] = Field(True, description="Write TensorBoard event files.")
    keep_checkpoints: MayChange[Int] = Field(
        3, ge=1, description="Step checkpoints to keep; the final one always stays."
    )
    checkpoint_minutes: MayChange[Float] = Field(
        5.0, gt=0, description="Save at least this often, whatever save_interval says."
    )


class Config(Section):
    """All settings of a run. Its config.yaml holds those that its algorithm uses, defaults filled in."""

    algorithm: Algorithm = Field("ppo", description="What learns: ppo, a2c, a3c or impala.")
    mode: Mode = Field("sequential", description="sequential: one process; parallel: all cores; distributed: machines.")
    output_dir: MayChange[str | None] = Field(
        None, min_length=1, description="Directory of the run; null uses logging.log_dir and logging.checkpoint_dir."
    )
    env: EnvConfig = Field(default_factory=EnvConfig, description="")
    model: ModelConfig = Field(default_factory=ModelConfig, description="")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="")
    impala: ImpalaConfig = Field(default_factory=ImpalaConfig, description="")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="")
    hardware: HardwareConfig = Field(default_factory=HardwareConfig, description="")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="")

    @property
    def traits(self) -> Traits:
        """Return the properties of the algorithm that do not concern its maths."""
        return TRAITS[self.algorithm]

    @property
    def is_sequential(self) -> bool:
        """Return whether one process does everything."""
        return is_sequential(self.mode)

    @property
    def is_parallel(self) -> bool:
        """Return whether the run has workers on this machine alone."""
        return is_parallel(self.mode)

    @property
    def is_distributed(self) -> bool:
        """Return whether the run has workers on several machines."""
        return is_distributed(self.mode)

    @property
    def rollout_size(self) -> int:
        return self.env.num_envs * self.training.n_steps

    @property
    def batch_size(self) -> int:
        """Return the size of a minibatch: training.batch_size, or the whole rollout if that is smaller."""
        return min(self.training.batch_size, self.rollout_size)

    @property
    def num_machines(self) -> int:
        return self.cluster.num_workers if self.is_distributed else 1

    @property
    def unrolls_per_step(self) -> int:
        """Return how many unrolls (n_steps of one environment) make IMPALA's batch: about batch_size steps in all.

        Each learner takes equally many.
        """
        learners = self.impala.num_learners if not self.is_sequential and self.impala.num_learners != "auto" else 1
        learners *= self.num_machines  # as if all machines had equally many
        return self.unrolls_per_learner(learners) * learners

    def unrolls_per_learner(self, learners: int) -> int:
        """Return how many unrolls each of `learners` learners takes for an optimiser step of IMPALA."""
        each = round(self.training.batch_size / self.training.n_steps / learners)
        return max(1, min(each, self.env.num_envs // learners))

    @model_validator(mode="after")
    def _check(self) -> Self:
        workers, per_worker = self.parallel.num_workers, self.parallel.num_envs_per_worker
        if self.is_distributed:
            is_known = per_worker is None  # otherwise the machines that join decide how many environments there are
        else:
            is_known = self.is_sequential or (workers is not None and per_worker in (None, self.env.num_envs / workers))
        if self.traits.has_minibatches and is_known and self.rollout_size % self.batch_size:
            raise ValueError(
                f"training.batch_size = {self.training.batch_size} does not divide the rollout of "
                f"{self.env.num_envs} envs x {self.training.n_steps} steps = {self.rollout_size}; "
                f"sizes near it that do: {', '.join(map(str, _near_divisors(self.rollout_size, self.batch_size)))}"
            )
        if self.is_parallel and is_known and workers is not None and self.env.num_envs < workers:
            raise ValueError(
                f"{self.env.num_envs} environments cannot be shared by {workers} workers; "
                "set parallel.num_envs_per_worker or fewer parallel.num_workers"
            )
        if self.traits.has_actors and self.impala.passes > 1 and self.impala.replay_fraction > 0:
            raise ValueError(
                f"impala.passes = {self.impala.passes} and impala.replay_fraction = {self.impala.replay_fraction} both "
                "learn from experience again; set passes to 1 or replay_fraction to 0"
            )
        learners = self.impala.num_learners
        is_known = is_known and self.is_parallel
        if self.traits.has_actors and is_known and isinstance(learners, int) and learners > self.env.num_envs:
            raise ValueError(f"{learners} learners need as many environments, but there are {self.env.num_envs}")
        if self.cluster.min_nodes is not None and self.cluster.min_nodes > self.cluster.num_workers:
            raise ValueError(
                f"cluster.min_nodes = {self.cluster.min_nodes} is more than the {self.cluster.num_workers} machines of "
                "cluster.num_workers"
            )
        if self.cluster.sync != "allreduce" and self.cluster.compression != "none":
            raise ValueError("cluster.compression is for gradients: it needs cluster.sync = allreduce")
        suits = self.traits.synchronisations
        if self.is_distributed and self.cluster.sync not in suits:
            raise ValueError(
                f"cluster.sync = {self.cluster.sync} is not for {self.algorithm}; it can be {' or '.join(suits)}"
            )
        if self.hardware.device != "cpu" and not self.is_sequential:
            raise ValueError(f"hardware.device = {self.hardware.device} works in sequential mode only")
        return self


def _near_divisors(total: int, size: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(total) + 1) if total % d == 0]
    divisors = {*small, *(total // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: abs(d - size))[:4])
