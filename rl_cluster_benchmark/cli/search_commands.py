"""The subcommand that searches for better settings: `rlcb search`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rl_cluster_benchmark.cli.arguments import number, positive, start_signals
from rl_cluster_benchmark.core.errors import UserError

SEARCH_DIR = "runs/search"
MAX_HOURS = 100_000.0

HELP = """\
Search for hyperparameters with which a task is learned better. A YAML file, the space, says which keys of the config
are tried with which values, on which games and seeds, and how a trial is scored. Each trial trains with other values,
chosen by Optuna's TPE sampler from the results so far; the worse ones can be stopped early. At the end there are a
table, best.yaml for `rlcb train --config`, trials.csv and two pictures. Every trial is a directory of ordinary runs.

  total_timesteps: 200_000              of each run
  games: {coinrun: {low: 2.6, high: 7.9}}    the returns that count as 0 and as 1
  score: {last_steps: 50_000}           mean return of the episodes that end in the last steps
  prune: [{at: 80_000, stop: 0.5}]      after 80,000 steps the worse half is stopped
  set: {env.num_envs: 64}               fixed for all trials
  space:
    training.learning_rate: {low: 1e-4, high: 2e-3, log: true}
    training.n_epochs: [1, 2, 3]

The same command with the same --output-dir goes on where the search ended, whether by Ctrl-C, a kill or because
it was done (give more --trials); trials in hand are then trained anew. Several processes, also on several machines, may
give the same command at the same time: each trial is trained by one of them. docs/search.md has the whole story.
"""
EXAMPLES = """\
examples:
  rlcb search --space catch --trials 8                    a first look: a toy game, minutes
  rlcb search --space ppo_procgen --trials 60 --jobs 4 --output-dir runs/search_ppo
  rlcb search --space my_space.yaml --budget 10           no trial begins that would not be done after ten hours
  rlcb search --space my_space.yaml --enqueue tried.yaml --trials 40    begin with settings that are known
  rlcb search --output-dir runs/search_ppo --trials 100   go on, up to 100 trials in all
  sbatch --array=0-9 --wrap "rlcb search --space ppo_procgen --trials 60 --output-dir /shared/search"
  rlcb train --config runs/search_ppo/best.yaml --env jumper --output-dir runs/jumper
"""


def add_search_command(commands: Any) -> None:
    search = commands.add_parser(
        "search",
        help="find better hyperparameters",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    search.add_argument(
        "--space", metavar="FILE",
        help="the space, or the name of one that is shipped (catch, ppo_procgen); default: that of the search there",
    )  # fmt: skip
    search.add_argument(
        "--enqueue", metavar="FILE", help="a YAML list of settings to try first, behind the candidates of the space"
    )
    search.add_argument("--trials", type=positive, metavar="N", help="end when the search has N trials in all")
    hours = number(lambda value: 0 < value <= MAX_HOURS, "a number of hours greater than 0")
    search.add_argument(
        "--budget", type=hours, metavar="HOURS",
        help="begin no trial that would end after so many hours of this call, going by the longest trial so far",
    )  # fmt: skip
    search.add_argument(
        "--jobs", type=positive, default=1, metavar="N",
        help="trials at the same time, which share the cores with all their runs; default: 1",
    )  # fmt: skip
    search.add_argument("--output-dir", type=Path, metavar="DIR", default=SEARCH_DIR, help=f"default: {SEARCH_DIR}")
    search.set_defaults(run=_search)


def _search(args: argparse.Namespace) -> int:
    from rl_cluster_benchmark.tools.search import searching
    from rl_cluster_benchmark.tools.search.sampling import require_optuna
    from rl_cluster_benchmark.tools.search.space_files import read_space

    require_optuna()
    if args.trials is None and args.budget is None:
        raise UserError("Say how long to search: --trials N, --budget HOURS, or both.")
    if args.enqueue is not None and args.space is None:
        raise UserError("--enqueue needs --space: candidates are a part of what a search is begun with.")
    space = read_space(args.space, args.enqueue) if args.space is not None else None
    seconds = args.budget * 3600 if args.budget is not None else None
    settings = searching.SearchSettings(args.output_dir, args.trials, seconds, args.jobs)
    return searching.search(space, settings, start_signals())
