"""What limits a run, and what would help: from the profile to two or three sentences."""

from __future__ import annotations

from dataclasses import dataclass

from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.machine.detection import Machine
from rl_cluster_benchmark.machine.planning import balance
from rl_cluster_benchmark.profiling.stages import BACKWARD
from rl_cluster_benchmark.tools.profile.figures import Profile, mean_shares

ENVIRONMENT, NETWORK, COMMUNICATION = "environment", "neural network", "communication"
UNEVEN, STARVED, BOOKKEEPING = "uneven workers", "starved learner", "bookkeeping"
SMALLER_BOOKKEEPING = "Larger rollouts (training.n_steps) and more environments per worker make it smaller."
IDLE = 0.2  # of a role's time: more means that it waits for the other one
DISTURBED = 0.15  # of the cores, taken by others


@dataclass(frozen=True)
class Verdict:
    """What limits a run, and the sentences that say so and what would help."""

    bottleneck: str
    sentences: list[str]


def judge(profile: Profile, config: Config, machine: Machine) -> Verdict:
    verdict = _roles(profile, config, machine) if profile.of_role("learner") else _workers(profile, config, machine)
    if profile.others_cpu > DISTURBED * len(profile.cores):
        verdict.sentences.append(
            f"Something else took {profile.others_cpu:.1f} of {len(profile.cores)} cores meanwhile: repeat this on a "
            "quiet machine before you act on it."
        )
    return verdict


def _workers(profile: Profile, config: Config, machine: Machine) -> Verdict:
    """Judge a run in which every process acts and learns."""
    shares = mean_shares(profile.processes)
    network = shares["inference"] + shares["update"]
    costs = {  # what may be the bottleneck: its share of the time, what takes it, what would help
        ENVIRONMENT: (shares["env"], "Stepping the environments takes", _faster_environment(profile, config, machine)),
        NETWORK: (network, "Its passes take", _faster_network(profile, config, machine)),
        COMMUNICATION: (
            shares["communication"], "Summing gradients between the workers takes", _less_communication(config)
        ),
        UNEVEN: (shares["waiting"], "Waiting for the slowest worker takes", _more_even(config)),
        BOOKKEEPING: (shares["other"], "What is neither environment nor network takes", SMALLER_BOOKKEEPING),
    }  # fmt: skip
    bottleneck = max(costs, key=lambda name: costs[name][0])
    share, what, advice = costs[bottleneck]
    parts = f" ({shares['inference']:.0%} to act, {shares['update']:.0%} to learn)" if bottleneck == NETWORK else ""
    first = (
        f"The bottleneck is the {bottleneck}. {what} {share:.0%} of the time{parts}; if it cost nothing, the run would "
        f"be {_bound(share)} as fast."
    )
    return Verdict(bottleneck, [first, advice])


def _bound(share: float) -> str:
    return f"{1 / (1 - share):.1f} times" if share < 0.99 else "over 100 times"


def _faster_environment(profile: Profile, config: Config, machine: Machine) -> str:
    idle = machine.usable_cores - profile.own_cpu
    flag = "--workers-per-node" if config.is_distributed else "--num-workers"
    more = f"--mode parallel with a worker on each, or more {flag}" if config.is_sequential else f"more {flag}"
    if idle > 0.5 and len(profile.processes) * profile.threads < machine.usable_cores:
        return f"{idle:.1f} of {machine.usable_cores} cores are idle: {more}, steps more environments at once."
    return (
        "All cores are in use, so only more cores or machines, or a cheaper game, will help; a larger network or more "
        "epochs would cost little here."
    )


def _faster_network(profile: Profile, config: Config, machine: Machine) -> str:
    rate = profile.rate(BACKWARD)
    reached = ""
    if rate is not None:
        reached = f"Its backward pass reaches {rate.gflops:.0f} GFLOP/s in each process"
        if rate.of_peak is not None:
            reached += f", {rate.of_peak:.0%} of what matrix multiplication reaches there in {profile.precision}"
            if profile.engine == "native":
                reached += " (operations as plain convolutions would need them; the C code needs fewer)"
        reached += ". "
    steps = []
    is_float32 = profile.engine == "torch" and profile.precision == "float32"
    if is_float32 and machine.fast_bfloat16 and config.env.game is not None:
        steps.append(f"hardware.precision=bfloat16 (the CPU has {machine.fast_bfloat16})")
    if config.is_sequential and machine.usable_cores > 1:
        steps.append("--mode parallel (a process on each core instead of threads)")
    elif profile.engine == "torch" and config.hardware.engine == "torch":
        steps.append("hardware.engine=native (the network in C)")
    if len(profile.processes) * profile.threads < machine.usable_cores:
        steps.append(f"all {machine.usable_cores} cores instead of {len(profile.processes) * profile.threads}")
    if steps:
        return f"{reached}What would help: {'; '.join(steps)}. `rlcb tune` measures which."
    fewer = {"ppo": " or fewer training.n_epochs", "impala": " or fewer impala.passes"}.get(config.algorithm, "")
    return (
        f"{reached}It already runs as fast here as this program can run it; more cores, a smaller network (model.*)"
        f"{fewer} would help; all but more cores change what is learned. `rlcb tune` looks for the rest."
    )


def _less_communication(config: Config) -> str:
    if config.is_distributed:
        rarely = config.traits.synchronisations[-1]
        return (
            "Gradients cross the network: a faster link, cluster.compression=bfloat16 (half the bytes), larger batches "
            f"or cluster.sync={rarely} (fewer sums) would help; the last two change what is learned."
        )
    larger = "a larger training.n_steps" if config.traits.learns_whole_rollouts else "a larger training.batch_size"
    epochs = ", fewer training.n_epochs" if config.traits.has_minibatches else ""
    who = "learners" if config.traits.has_actors else "workers"
    return (
        f"Fewer or smaller sums would help: {larger}{epochs}, fewer {who}, or a network with fewer parameters; all "
        f"but the number of {who} change what is learned."
    )


def _more_even(config: Config) -> str:
    if config.traits.is_lock_free:
        return (
            "Workers wait for each other only at the end of a run: a longer one waits less, and environments should be "
            "a multiple of the workers."
        )
    return (
        f"Workers differ in speed or in work: more parallel.balance (now {balance(config):g}) lets fast ones take "
        "over, other programs on these cores should go, and environments should be a multiple of the workers. "
        "`rlcb tune` tries it."
    )


def _roles(profile: Profile, config: Config, machine: Machine) -> Verdict:
    """Judge a run of actors and learners: whoever waits shows that the others limit the run."""
    actors, learners = profile.of_role("actor"), profile.of_role("learner")
    acting, learning = mean_shares(actors), mean_shares(learners)
    split = f"actors: {len(actors)}, learners: {len(learners)}"
    if learning["waiting"] >= IDLE and learning["waiting"] >= acting["waiting"]:
        most = "the environments" if acting["env"] > acting["inference"] else "inference"
        move = "one learner less and one actor more" if len(learners) > config.num_machines else "more actors"
        return Verdict(
            STARVED,
            [
                f"The bottleneck is a {STARVED}: learners wait {learning['waiting']:.0%} of their time for experience "
                f"({split}). Actors wait {acting['waiting']:.0%}; their time goes to the environments "
                f"({acting['env']:.0%}) and to inference ({acting['inference']:.0%}).",
                f"What would help: {move} (--set impala.num_actors=N --set impala.num_learners=N, or auto), or making "
                f"{most} cheaper. `rlcb tune --algorithm impala` measures the split.",
            ],
        )
    if acting["waiting"] >= IDLE and learning["communication"] > learning["update"]:
        return Verdict(
            COMMUNICATION,
            [
                f"The bottleneck is the {COMMUNICATION} between the learners: it takes {learning['communication']:.0%} "
                f"of their time, learning {learning['update']:.0%}; actors wait {acting['waiting']:.0%} of theirs for "
                f"them ({split}).",
                _less_communication(config),
            ],
        )
    if acting["waiting"] >= IDLE:
        share_cores = len(profile.processes) * profile.threads > machine.usable_cores
        fewer = " and fewer actors" if len(actors) > config.num_machines else ""
        first = "more cores" if share_cores else f"more learners{fewer} (--set impala.num_learners=N, or auto)"
        return Verdict(
            NETWORK,
            [
                f"The bottleneck is the {NETWORK}, in the learners: they are busy {1 - learning['waiting']:.0%} of "
                f"their time, and actors wait {acting['waiting']:.0%} of theirs for them ({split}).",
                f"What would help: {first}, or a smaller network. `rlcb tune --algorithm impala` measures the split.",
            ],
        )
    shares = mean_shares(profile.processes)
    network = shares["inference"] + shares["update"]
    bottleneck = NETWORK if network >= shares["env"] else ENVIRONMENT
    return Verdict(
        bottleneck,
        [
            f"Actors and learners are in balance ({split}; they wait {acting['waiting']:.0%} and "
            f"{learning['waiting']:.0%}). The bottleneck is the {bottleneck}: the network takes {network:.0%} of all "
            f"processes' time, the environments {shares['env']:.0%}.",
            "What would help: more cores, or a cheaper network or game.",
        ],
    )
