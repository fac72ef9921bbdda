"""What Optuna does for a search: it suggests the parameters of a trial, and says which parameters mattered.

A study is built in memory for each suggestion, from the trials that have ended. So what is suggested for trial n
follows from the study's seed, n and these trials alone, and a search that was killed goes on as if it had not been.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.seeding import integer_seed
from rl_cluster_benchmark.tools.search.search_space import Parameter, Params, SearchSpace
from rl_cluster_benchmark.tools.search.study import Trial

if TYPE_CHECKING:
    import optuna

TOP = 0.25  # importance is about reaching this share of the trials
FEWEST_FOR_IMPORTANCES = 12  # trials: three of them are the top


def require_optuna() -> Any:
    """Return the module, told to be quiet; raise a UserError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError(
            'rlcb search needs Optuna, which is not installed: pip install "optuna>=5" (the extra [search]).'
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def suggest(space: SearchSpace, number: int, ended: Sequence[Trial]) -> Params:
    """Return the parameters of trial `number`; the first trials are the candidates, with what they leave out added."""
    study = _study(space, number, ended)
    if number < len(space.candidates):
        candidate = space.candidates[number]
        study.enqueue_trial({key: _encoded(space.space[key], value) for key, value in candidate.items()})
    trial = study.ask()
    params: Params = {}
    for key, parameter in space.space.items():
        if parameter.exists(params):
            params[key] = _suggest(trial, key, parameter)
    return params


def importances(space: SearchSpace, trials: Sequence[Trial]) -> dict[str, float] | None:
    """Return how much each parameter decides whether a trial is among the best quarter; None for too few trials.

    Trials are compared after equal numbers of steps: at the first rung, which all of them reach, or without rungs at
    the end. The numbers add up to 1 (Optuna's PED-ANOVA).
    """
    optuna = require_optuna()
    values = {trial.number: trial.first_value(space) for trial in trials}
    judged = [(trial, value) for trial in trials if (value := values[trial.number]) is not None]
    if len(judged) < FEWEST_FOR_IMPORTANCES:
        return None
    study = optuna.create_study(direction="maximize")
    for trial, value in judged:
        study.add_trial(_frozen(space, trial.params, state=optuna.trial.TrialState.COMPLETE, value=value))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=TOP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return {key: found[key] for key in sorted(found, key=lambda key: (-found[key], key))}


def _study(space: SearchSpace, number: int, ended: Sequence[Trial]) -> optuna.Study:
    """Return a study of the trials that have ended; one that failed ranks behind all others."""
    optuna = require_optuna()
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=space.startup_trials, multivariate=True, group=True, constant_liar=False,
        seed=integer_seed(space.seed, "search", number),
    )  # fmt: skip
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.NopPruner())
    states = optuna.trial.TrialState
    for trial in sorted(ended, key=lambda trial: trial.number):
        if trial.state == "complete":
            result: dict[str, Any] = {"state": states.COMPLETE, "value": trial.score}
        else:
            result = {"state": states.PRUNED, "intermediate_values": trial.rungs if trial.state == "pruned" else {}}
        study.add_trial(_frozen(space, trial.params, **result))
    return study


def _frozen(space: SearchSpace, params: Params, **result: Any) -> optuna.trial.FrozenTrial:
    return require_optuna().trial.create_trial(
        params={key: _encoded(space.space[key], value) for key, value in params.items()},
        distributions={key: _distribution(space.space[key]) for key in params},
        **result,
    )


def _distribution(parameter: Parameter) -> optuna.distributions.BaseDistribution:
    kinds = require_optuna().distributions
    if parameter.choices is not None:
        return kinds.CategoricalDistribution([_encoded(parameter, value) for value in parameter.choices])
    if isinstance(parameter.low, int):
        return kinds.IntDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step or 1)
    return kinds.FloatDistribution(parameter.low, parameter.high, log=parameter.log, step=parameter.step)


def _suggest(trial: optuna.Trial, key: str, parameter: Parameter) -> Any:
    if parameter.choices is not None:
        return json.loads(trial.suggest_categorical(key, [_encoded(parameter, value) for value in parameter.choices]))
    if isinstance(parameter.low, int):
        return trial.suggest_int(key, parameter.low, parameter.high, log=parameter.log, step=parameter.step or 1)
    return trial.suggest_float(key, parameter.low, parameter.high, log=parameter.log, step=parameter.step)


def _encoded(parameter: Parameter, value: Any) -> Any:
    """Return a value as Optuna takes it: choices as JSON, for it takes no lists."""
    return json.dumps(value) if parameter.choices is not None else value
