"""What is said of runs side by side, on runs made up for it: what does not compare is not compared."""

import re
from pathlib import Path

import pytest

from rl_cluster_benchmark.config import config_files
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.evaluations import Evaluation
from rl_cluster_benchmark.tools.analysis.run_files import Summary, summary_of
from rl_cluster_benchmark.tools.analysis.runs import RunRecord
from rl_cluster_benchmark.tools.analysis.series import columns
from rl_cluster_benchmark.tools.analysis.verdicts import headline
from rl_cluster_benchmark.tools.reports import report_data
from rl_cluster_benchmark.tools.reports.template import as_template

LINE = {"step": 1000, "time": 10.0, "update": 10, "charts/SPS": 100.0, "charts/episodic_return": 5.0,
        "charts/episodes": 200}  # fmt: skip


def make(mode="sequential", algorithm="ppo", game="Catch-v0", evaluation=None, seed=1, **summary):
    """A finished run; `evaluation` is (levels, reward, are the likeliest actions taken, number of episodes)."""
    config = config_files.load(None, {"algorithm": algorithm, "mode": mode, "env.name": game, "env.seed": seed})
    known = {
        "state": "finished", "total_timesteps": 1000, "total_updates": 10, "duration_hours": 1, "avg_fps": 100,
        "final_fps": 100, "peak_memory_gb": 1, "final_reward": 5.0, "num_episodes": 200, "cpu_model": "A CPU",
        "usable_cores": 4, "num_workers": 1,
    }  # fmt: skip
    found = {}
    if evaluation is not None:
        levels, reward, deterministic, episodes = evaluation
        found[levels] = Evaluation(
            mean_reward=reward, std_reward=1, min_reward=0, max_reward=9, mean_length=9, std_length=1,
            num_episodes=episodes, ci95=(reward - 0.1, reward + 0.1), levels=levels, deterministic=deterministic,
            env=game,
        )  # fmt: skip
    path = Path(f"{algorithm}_{mode}_{game}_{seed}")
    return RunRecord(path, config, "finished", None, Summary(**known | summary), columns([LINE]), found)


def scaling(*runs):
    """(processes, speed-up, efficiency) of each variant in the report."""
    _, *rows = report_data.page(Comparison.of(runs, []), "")["tasks"][0]["scaling"]
    return {row[0]: (row[1], row[4], row[5]) for row in rows}


def test_efficiency_is_of_all_processes():
    """IMPALA's learners are processes too."""
    rows = scaling(
        make(algorithm="impala"),
        make("parallel", "impala", num_workers=2, num_learners=2, avg_fps=300),
        make(),
        make("parallel", num_workers=4, num_learners=0, avg_fps=300),
    )
    assert rows["IMPALA parallel"] == ("4", "3.00x", "75%")
    assert rows["PPO parallel"] == ("4", "3.00x", "75%")


def test_efficiency_is_unknown_where_the_number_of_processes_is():
    killed = summary_of(columns([LINE]), "interrupted")
    assert killed.num_workers is None
    assert scaling(make(), make("parallel", num_workers=None, avg_fps=300))["PPO parallel"] == ("-", "3.00x", "-")
    differing = (make("parallel", seed=seed, num_workers=seed, avg_fps=300) for seed in (1, 2))
    assert scaling(make(), *differing)["PPO parallel"] == ("-", "3.00x", "-")


def test_no_speedup_and_no_winner_in_speed_over_different_machines():
    runs = [make(), make("parallel", avg_fps=300, cpu_model="Another CPU")]
    comparison = Comparison.of(runs, [])
    assert [comparison.speedup(group) for group in comparison.groups] == [None, None]
    assert re.search(r"Average FPS +100 +300 +-\n", as_template(comparison))
    assert Comparison.of([runs[0], make("parallel", avg_fps=300)], []).groups[1].variant == "PPO parallel"
    same = Comparison.of([runs[0], make("parallel", avg_fps=300)], [])
    assert same.speedup(same.groups[1]) == pytest.approx(3.0)


@pytest.mark.parametrize("levels", ["train", "all"])
def test_sampled_and_likeliest_actions_are_not_ranked(levels):
    runs = [make(evaluation=(levels, 3.0, False, 20)), make("parallel", evaluation=(levels, 8.0, True, 50))]
    comparison = Comparison.of(runs, [])
    assert any("sampled actions, others with the likeliest ones" in note for note in comparison.warnings())
    assert comparison.basis[0] == "training", "of the rewards that compare"
    note = report_data.page(comparison, "")["evaluation_note"]
    assert "20 to 50 episodes for each agent, with sampled actions in some, the likeliest action in others" in note
    text = as_template(comparison)
    name = {"train": "training", "all": "all"}[levels]
    assert re.search(rf"Evaluation, {name} levels +3\.00 +8\.00 +-\n", text)
    assert f"Evaluation Results (20 episodes, sampled actions, {name} levels)" in text
    assert f"Evaluation Results (50 episodes, deterministic, {name} levels)" in text


def test_a_block_of_evaluations_says_how_many_episodes_they_have():
    runs = [make(evaluation=("train", 3.0, False, 20)), make(seed=2, evaluation=("train", 8.0, False, 50))]
    assert "Evaluation Results (20 to 50 episodes, sampled actions" in as_template(Comparison.of(runs, []))


def test_evaluations_of_different_kinds_have_a_block_each_and_a_warning():
    """A mean of sampled and of the likeliest actions would be of neither."""
    runs = [make(evaluation=("train", 3.0, False, 20)), make(seed=2, evaluation=("train", 8.0, True, 50))]
    comparison = Comparison.of(runs, [])
    text = as_template(comparison)
    assert "Evaluation Results (20 episodes, sampled actions, training levels):\n  Mean Reward: 3.00" in text
    assert "Evaluation Results (50 episodes, deterministic, training levels):\n  Mean Reward: 8.00" in text
    assert any("sampled" in warning and "likeliest" in warning for warning in comparison.warnings())


def test_without_a_common_game_nobody_is_ranked():
    runs = [make(seed=seed) for seed in (1, 2, 3)]
    runs += [make("parallel", game="CartPole-v1", seed=seed) for seed in (1, 2, 3)]
    comparison = Comparison.of(runs, [])
    assert comparison.warnings() == ["No game was played by all variants: they are not ranked."]
    assert headline(comparison) == []
