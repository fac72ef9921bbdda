"""Comparing runs: the documented two-run form, any number of runs, every format, on real runs."""

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from helpers.commands import ROOT, environment, rlcb, tiny_run
from helpers.run_copies import copy_run, edit_json, evaluate_as

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core.text import escape_markdown
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.groups import group_runs, reached
from rl_cluster_benchmark.tools.analysis.runs import load_run
from rl_cluster_benchmark.tools.analysis.verdicts import headline
from rl_cluster_benchmark.tools.reports import tables
from rl_cluster_benchmark.tools.reports.template import as_template

COINRUN, STARPILOT = "procgen-coinrun-v0", "procgen-starpilot-v0"


@pytest.fixture(scope="module")
def documented(cells, tmp_path_factory):
    """compare_results.py as the guide calls it, on copies whose figures are those of the guide."""
    folder = tmp_path_factory.mktemp("documented")
    figures = {"duration_hours": 1.0, "state": "finished"}
    copy_run(
        cells["ppo_sequential"], folder / "benchmarks" / "sequential_1h", **figures, total_timesteps=5_471_232,
        total_updates=1342, avg_fps=1520.0, final_fps=1518.0, initial_reward=2.45, final_reward=7.23, best_reward=8.91,
        peak_memory_gb=2.34,
    )  # fmt: skip
    copy_run(
        cells["ppo_parallel"], folder / "benchmarks" / "parallel_1h", **figures, total_timesteps=11_536_384,
        total_updates=2832, avg_fps=3204.0, final_fps=3198.0, initial_reward=2.38, final_reward=8.45, best_reward=9.67,
        peak_memory_gb=6.12,
    )  # fmt: skip
    call = [sys.executable, ROOT / "compare_results.py"]
    call += ["--sequential", "./benchmarks/sequential_1h", "--parallel", "./benchmarks/parallel_1h"]
    call += ["--output", "./benchmarks/comparison.png"]
    done = subprocess.run(call, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_the_documented_table(documented):
    _, output = documented
    rows = [line.split("  ") for line in output.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    for row in (
        ["TRAINING COMPARISON"],
        ["Metric", "Sequential", "Parallel"],
        ["Duration (hours)", "1.00", "1.00"],
        ["Total Timesteps", "5,471,232", "11,536,384"],
        ["Total Updates", "1,342", "2,832"],
        ["Performance Metrics"],
        ["Average FPS", "1,520", "3,204"],
        ["Speedup (Parallel/Sequential)", "-", "2.11x"],
        ["Final FPS", "1,518", "3,198"],
        ["Reward Metrics"],
        ["Initial Reward", "2.45", "2.38"],
        ["Final Reward", "7.23", "8.45"],
        ["Best Reward", "8.91", "9.67"],
        ["Resource Usage"],
        ["Peak Memory (GB)", "2.34", "6.12"],
        ["Efficiency Metrics"],
        ["Timesteps/Hour", "5,471,232", "11,536,384"],
        ["Efficiency Gain (%)", "-", "110.9%"],
    ):
        assert row in cells, row
    lines = output.splitlines()
    assert lines[0] == lines[2] == "=" * 80
    assert lines[3] == f"{'Metric':<40} {'Sequential':<20} {'Parallel':<20}"
    assert lines[4] == "-" * 80


def test_the_documented_report_and_plot(documented):
    folder, output = documented
    assert (folder / "comparison_report.txt").read_text() == "\n".join(
        [
            "=" * 80,
            "SEQUENTIAL VS PARALLEL TRAINING COMPARISON REPORT",
            "=" * 80,
            "",
            "Sequential Directory: benchmarks/sequential_1h",
            "Parallel Directory: benchmarks/parallel_1h",
            "",
            "SEQUENTIAL TRAINING",
            "-" * 80,
            "Duration: 1.00 hours",
            "Total Timesteps: 5,471,232",
            "Average FPS: 1,520",
            "Peak Memory: 2.34 GB",
            "",
            "PARALLEL TRAINING",
            "-" * 80,
            "Duration: 1.00 hours",
            "Total Timesteps: 11,536,384",
            "Average FPS: 3,204",
            "Peak Memory: 6.12 GB",
            "",
            "COMPARISON",
            "-" * 80,
            "Speedup (FPS): 2.11x",
            "Efficiency Gain: 110.9%",
            "",
        ]
    )
    assert (folder / "benchmarks" / "comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert "One seed: no interval." in output


def test_the_two_run_form_without_output_writes_where_it_stands(cells, tmp_path):
    done = rlcb("compare", "--sequential", cells["a2c_sequential"], "--parallel", cells["a2c_parallel"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"comparison.png", "comparison_report.txt"}


def test_two_runs_of_different_tasks_have_no_speedup(cells, tmp_path):
    one = copy_run(cells["ppo_sequential"], tmp_path / "coinrun", config={"env.name": COINRUN})
    other = copy_run(cells["a2c_parallel"], tmp_path / "starpilot", config={"env.name": STARPILOT})
    done = rlcb("compare", "--sequential", one, "--parallel", other, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"Speedup \(Parallel/Sequential\) +- +- *\n", done.stdout)
    assert re.search(r"Efficiency Gain \(%\) +- +- *\n", done.stdout)
    assert "Speedup (FPS): -\n" in (tmp_path / "comparison_report.txt").read_text()
    assert "of different tasks (coinrun (easy, 200 levels) and starpilot (easy, 200 levels))" in done.stdout
    assert "of different algorithms: PPO and A2C." in done.stdout


def test_runs_without_a_common_game_are_said_not_to_be_ranked(cells, tmp_path):
    one = copy_run(cells["ppo_sequential"], tmp_path / "coinrun", config={"env.name": COINRUN})
    other = copy_run(cells["ppo_parallel"], tmp_path / "starpilot", config={"env.name": STARPILOT})
    notes = Comparison.load([one, other]).warnings()
    assert any(note.startswith("One seed") for note in notes)
    assert "No game was played by all variants: they are not ranked." in notes


def test_wrong_uses_of_the_two_run_form(cells, tmp_path):
    one, two = cells["ppo_sequential"], cells["ppo_parallel"]
    for args, text in (
        (("--sequential", one), "Give --sequential DIR and --parallel DIR"),
        (("--sequential", one, "--parallel", two, one), "not a part of each"),
        (("--sequential", two, "--parallel", one), "is a parallel run"),
        (("--sequential", tmp_path, "--parallel", two), "holds no run"),
        (("--sequential", one, "--parallel", two, "--output", tmp_path / "no" / "x.png"), "does not exist"),
        ((), "Nothing to compare"),
    ):
        done = rlcb("compare", *args, cwd=tmp_path)
        assert done.returncode == 2, done.stdout
        assert text in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_make_compare_compares_what_the_timed_targets_made():
    done = subprocess.run(["make", "-n", "compare"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--sequential benchmarks/sequential_1h --parallel benchmarks/parallel_1h" in done.stdout
    assert "--output benchmarks/comparison.png" in done.stdout


@pytest.fixture(scope="module")
def study(cells, tmp_path_factory):
    """PPO in two modes on two games, three seeds each; the parallel one is faster and learns more."""
    folder = tmp_path_factory.mktemp("study")
    for mode, fps, lead in (("sequential", 400, 0.0), ("parallel", 800, 2.0)):
        for env, base in ((COINRUN, 6.0), (STARPILOT, 5.0)):
            for seed in (1, 2, 3):
                name = f"{mode}_{env}_{seed}"
                changes = {"env.name": env, "env.seed": seed}
                reward = base + lead + 0.05 * seed
                run = copy_run(
                    cells[f"ppo_{mode}"], folder / name, config=changes, avg_fps=fps + seed, final_reward=reward
                )
                evaluate_as(run, env, train=reward, test=reward - 1.0)
    return folder


def test_runs_are_grouped_and_seeds_aggregated(study):
    comparison = Comparison.load([study])
    assert [(group.variant, group.task.game, len(group.runs)) for group in comparison.groups] == [
        ("PPO parallel", "coinrun", 3),
        ("PPO sequential", "coinrun", 3),
        ("PPO parallel", "starpilot", 3),
        ("PPO sequential", "starpilot", 3),
    ]
    data = tables.as_data(comparison)
    parallel = data["groups"][0]
    assert parallel["speedup"] == pytest.approx(802 / 402)
    assert parallel["fps"]["mean"] == pytest.approx(802)
    assert parallel["generalisation_gap"]["mean"] == pytest.approx(1.0)
    assert parallel["test_levels_reward"]["mean"] == pytest.approx(7.1)
    low, high = parallel["test_levels_reward"]["low"], parallel["test_levels_reward"]["high"]
    assert (low, high) == pytest.approx((7.1 - 0.05 * 4.302653 / 3**0.5, 7.1 + 0.05 * 4.302653 / 3**0.5))


def test_scores_over_games_are_normalised_with_the_published_ranges(study):
    comparison = Comparison.load([study])
    assert comparison.basis[0] == "test"
    scores = comparison.scores()["PPO sequential"]
    assert scores[0] == pytest.approx([(5.05 - 5) / 5, (5.10 - 5) / 5, (5.15 - 5) / 5])
    assert scores[1] == pytest.approx([(4.05 - 2.5) / 61.5, (4.10 - 2.5) / 61.5, (4.15 - 2.5) / 61.5])
    words = headline(comparison)
    assert words[0].startswith("Fastest: PPO parallel at 802 ")
    assert "2.00 times PPO sequential" in words[0]
    assert words[1].startswith("Learned most: PPO parallel")
    improvement = tables.as_data(comparison)["scores"]["probability_of_improvement"]
    assert [(pair["x"], pair["y"], pair["probability"]["mean"]) for pair in improvement] == [
        ("PPO parallel", "PPO sequential", 1.0)
    ]


def test_two_seeds_over_several_games_name_no_winner(study):
    paths = [path for path in study.iterdir() if not path.name.endswith("_3")]
    comparison = Comparison.load(paths)
    assert not any(word.startswith(("Fastest", "Learned most")) for word in headline(comparison))
    assert any("too few to name a winner" in note for note in comparison.warnings())


def test_one_seed_says_so_and_names_no_winner(cells):
    done = rlcb("compare", *cells.values())
    assert done.returncode == 0, done.stderr
    assert "one seed: no interval" in done.stdout
    assert "Fastest" not in done.stdout
    assert "Learned most" not in done.stdout


def test_unequal_training_is_said(cells, tmp_path):
    """Equally many steps, or equally much time, is a fair comparison; neither is not."""
    one = copy_run(cells["ppo_sequential"], tmp_path / "one", total_timesteps=1000, duration_hours=1.0)
    for steps, hours, is_said in ((1050, 3.0, False), (9000, 1.05, False), (9000, 3.0, True)):
        name = f"{steps}_{hours}"
        other = copy_run(cells["ppo_parallel"], tmp_path / name, total_timesteps=steps, duration_hours=hours)
        said = [note for note in Comparison.load([one, other]).warnings() if "trained for different" in note]
        assert bool(said) == is_said, (steps, hours)
    assert "steps (1,000 to 9,000) and different times (1h 00m to 3h 00m)" in said[0]


def test_settings_that_differ_are_not_taken_for_seeds(cells, tmp_path):
    run = cells["ppo_sequential"]
    other = copy_run(run, tmp_path / "other", config={"training.learning_rate": 0.5, "env.seed": 2})
    again = copy_run(run, tmp_path / "again")
    groups = Comparison.load([run, other, again]).groups
    assert sorted((group.variant, len(group.runs)) for group in groups) == [
        ("PPO sequential (learning_rate 0.001)", 1),
        ("PPO sequential (learning_rate 0.001) repeat 2", 1),
        ("PPO sequential (learning_rate 0.5)", 1),
    ]


def test_a_speed_up_of_other_work_is_called_that(cells, tmp_path):
    one = copy_run(cells["ppo_sequential"], tmp_path / "one", config={"model.mlp_sizes": [512], "training.n_epochs": 8})
    same = load_run(one).config
    alike = {f"training.{key}": getattr(same.training, key) for key in ("n_steps", "batch_size")}
    alike |= {"model.mlp_sizes": [512], "training.n_epochs": 8, "env.num_envs": same.env.num_envs}
    other = copy_run(cells["ppo_parallel"], tmp_path / "other", config=alike | {"training.learning_rate": 0.5})

    def said(*paths):
        return [note for note in Comparison.load(paths).warnings() if "speed-up" in note]

    assert said(one, other) == [], "the learning rate makes no work"
    other = copy_run(other, tmp_path / "less", config={"model.mlp_sizes": [8], "training.n_epochs": 1})
    (note,) = said(one, other)
    assert "PPO sequential and PPO parallel differ in model.mlp_sizes, training.n_epochs too" in note
    done = rlcb("compare", "--sequential", one, "--parallel", other, cwd=tmp_path)
    assert f"Note: {note}" in done.stdout


def test_seeds_whose_cores_were_split_by_a_measurement_are_one_variant(cells):
    """Each run measures anew, and on many cores may come to another split."""

    base = load_run(cells["ppo_parallel"])

    def variants(split):
        settings = {"algorithm": "impala", "mode": "parallel", "impala.split": split}
        runs = [
            replace(
                base,
                config=configs.load(
                    None,
                    settings
                    | {"env.seed": seed, "impala.num_learners": learners, "parallel.num_workers": 16 - learners},
                ),
            )
            for seed, learners in ((1, 6), (2, 5), (3, 6))
        ]
        return sorted(len(group.runs) for group in group_runs(runs))

    assert variants("measured") == [3]
    assert variants("given") == [1, 2]


def test_copies_that_went_on_to_the_same_step_both_count(cells, tmp_path):
    one = copy_run(cells["ppo_parallel"], tmp_path / "one", run_id="the same")
    same = copy_run(one, tmp_path / "same", run_id="the same")
    changed = {"config": {"parallel.reduce": "gloo"}, "duration_hours": 0.5}
    other = copy_run(one, tmp_path / "other", run_id="the same", **changed)
    comparison = Comparison.load([one, same, other])
    assert sorted(len(group.runs) for group in comparison.groups) == [1, 1]
    assert [left.path for left in comparison.left_out] == [same]
    assert any("have one beginning (a copy went on)" in note for note in comparison.warnings())


def test_where_machines_meet_is_no_setting_of_the_variant(cells, tmp_path):
    """`rlcb launch local` takes a free port each time: those runs are seeds of one variant."""
    runs = [
        copy_run(
            cells["ppo_parallel"], tmp_path / str(seed),
            config={
                "env.seed": seed, "cluster.master_port": 30_000 + seed, "cluster.master_addr": f"10.0.0.{seed}",
                "cluster.interface": f"eth{seed}", "cluster.timeout": 60 + seed, "cluster.max_restarts": seed,
                "training.watchdog": 300 + seed, "training.save_interval": 100 + seed,
            },
        )
        for seed in (1, 2, 3)
    ]  # fmt: skip
    groups = Comparison.load(runs).groups
    assert [(group.variant, len(group.runs)) for group in groups] == [("PPO parallel", 3)]
    other = copy_run(runs[2], tmp_path / "other", config={"cluster.sync": "local_sgd", "env.seed": 4})
    assert len(Comparison.load([*runs, other]).groups) == 2


def test_a_run_that_was_resumed_with_other_workers_has_no_speed_up(trained, tmp_path, call):
    """Its mean speed is that of neither number, and it is no seed of the runs that had the last one throughout."""
    mixed, whole = tmp_path / "mixed", tmp_path / "whole"
    parallel = ("--mode", "parallel", "--set", "parallel.pin=never")
    for more in (("--num-workers", 1), ("--num-workers", 2, "--resume")):
        done = tiny_run(mixed, *parallel, *more, timesteps=2000 if "--resume" not in more else 4000)
        assert done.returncode == 0, done.stderr
    note = "it was not trained under the same conditions throughout (num_workers 1 then 2)"
    assert note in call("runs", mixed)[1]

    parts = json.loads((mixed / "training_summary.json").read_text())["parts"]
    assert [part["num_workers"] for part in parts] == [1, 2]
    copy_run(mixed, whole, config={"env.seed": 7}, parts=parts[1:])
    data = json.loads(call("compare", trained, mixed, "--format", "json")[1])
    assert [group["speedup"] for group in data["groups"]] == [None, None]
    assert any(note in text for text in data["notes"])
    assert data["headline"][0] == "Speeds are not compared: conditions changed while a run was trained."
    two = ("--output", tmp_path / "plot.png", "--report", tmp_path / "report.txt")
    out = call("compare", "--sequential", trained, "--parallel", mixed, *two)[1]
    assert re.search(r"Speedup \(Parallel/Sequential\) +- +-", out)
    assert note in out
    data = json.loads(call("compare", trained, whole, "--format", "json")[1])
    assert data["groups"][1]["speedup"] > 0
    data = json.loads(call("compare", mixed, whole, "--format", "json")[1])
    names = ["PPO parallel (num_workers 1 then 2)", "PPO parallel (num_workers 2)"]
    assert [group["variant"] for group in data["groups"]] == names


def test_seeds_that_were_evaluated_in_two_ways_have_no_mean(cells, tmp_path, call):
    """Sampled actions in one, the likeliest in the other: there is no figure with an interval over both."""
    runs = [copy_run(cells["ppo_sequential"], tmp_path / str(seed), config={"env.seed": seed}) for seed in (1, 2)]
    edit_json(runs[1] / "evaluation_all.json", deterministic=True)
    data = json.loads(call("compare", *runs, "--format", "json")[1])
    (group,) = data["groups"]
    assert (group["seeds"], group["all_levels_reward"]) == ([1, 2], None)
    assert group["final_reward"]["mean"] is not None
    assert any("sampled actions, others with the likeliest" in note for note in data["notes"])
    shown = call("compare", *runs, "--format", "template")[1]
    assert "20 episodes, deterministic, all levels" in shown
    assert "20 episodes, sampled actions, all levels" in shown
    evaluate_as(runs[0], load_run(runs[0]).config.env.name, train=1.0, test=0.5)
    edit_json(runs[0] / "evaluation_test.json", deterministic=True)
    (group,) = json.loads(call("compare", runs[0], "--format", "json")[1])["groups"]
    assert group["generalisation_gap"] is None


def test_speeds_of_different_machines_are_not_compared(cells, tmp_path):
    other = copy_run(cells["ppo_parallel"], tmp_path / "other", cpu_model="Another CPU")
    comparison = Comparison.load([cells["ppo_sequential"], other])
    assert "Speeds are not compared: the runs come from different machines." in headline(comparison)
    assert any("Another CPU" in note for note in comparison.warnings())


def test_a_run_that_does_not_name_its_machine_may_be_of_another(cells, tmp_path):
    """A run that was killed names none: it has no summary."""
    killed = copy_run(cells["ppo_parallel"], tmp_path / "killed")
    for name in ("training_summary.json", "benchmark_metrics.json"):
        (killed / name).unlink()
    comparison = Comparison.load([cells["ppo_sequential"], killed], unfinished=True)
    assert "Speeds are not compared: the runs come from different machines." in headline(comparison)
    assert any("an unnamed machine" in note for note in comparison.warnings())
    assert not Comparison.load([killed], unfinished=True).machines(), "where none is named, nothing is said"


def test_time_to_a_threshold_counts_from_a_hundred_episodes_on(cells):
    run = load_run(cells["a2c_sequential"])
    rewards, episodes = run.series["charts/episodic_return"], run.series["charts/episodes"]
    threshold = float(rewards[episodes >= 100].max())
    steps, seconds = reached(run, threshold)
    first = next(i for i in range(len(rewards)) if episodes[i] >= 100 and rewards[i] >= threshold)
    assert (steps, seconds) == (run.series["step"][first], run.series["time"][first])
    assert reached(run, threshold + 0.01) is None
    done = rlcb("compare", cells["a2c_sequential"], "--threshold", 99)
    assert "time to 99.00" in done.stdout
    assert "not reached" in done.stdout


def test_the_published_curve_is_a_column(study, cells, tmp_path):
    long = copy_run(cells["ppo_sequential"], tmp_path / "long", config={"env.name": COINRUN}, total_timesteps=1_000_000)
    text = tables.as_table(Comparison.load([long]))
    assert re.search(r"published PPO\n.*\n.*7\.89 / 7\.4\d\n", text)
    assert "at 0.25M" in tables.as_table(Comparison.load([study]))


def test_every_format_holds_the_same_figures(study, tmp_path):
    outputs = {
        name: rlcb("compare", study, "--format", name, "--output", tmp_path / f"{name}.png", "--x", axis)
        for name, axis in (("csv", "steps"), ("json", "time"))
    }
    assert all(done.returncode == 0 for done in outputs.values())
    assert (tmp_path / "csv.png").read_bytes()[:4] == (tmp_path / "json.png").read_bytes()[:4] == b"\x89PNG"
    rows = list(csv.DictReader(io.StringIO(outputs["csv"].stdout)))
    groups = json.loads(outputs["json"].stdout)["groups"]
    assert [float(row["fps"]) for row in rows] == [group["fps"]["mean"] for group in groups]
    assert [float(row["test_levels_reward_low"]) for row in rows] == [g["test_levels_reward"]["low"] for g in groups]
    comparison = Comparison.load([study])
    for text in (tables.as_table(comparison), tables.as_markdown(comparison)):
        assert "802 (800 to 804)" in text
        assert "7.10 (6.98 to 7.22)" in text
        assert "Probability of improvement" in text
    assert "| PPO parallel | 3 |" in tables.as_markdown(comparison)


def test_the_template_names_winners_and_margins(study):
    text = as_template(Comparison.load([study]))
    assert text.count("BENCHMARK RESULTS - ") == 2
    block = text.split("\n\n" + "=" * 79)[0]
    for line in (
        "PPO PARALLEL",
        "PPO SEQUENTIAL",
        "Training Progress:",
        "Evaluation Results (20 episodes, sampled actions, unseen levels):",
        "COMPARISON",
        "Conclusion: ",
    ):
        assert line in block, line
    assert re.search(r"Average FPS +802 +402 +PPO parallel \(\+100%\)\n", block)
    assert re.search(r"Final Reward +8\.10 +6\.10 +PPO parallel \(\+33%\)\n", block)
    assert re.search(r"Memory Usage .* GB .* GB +(none: equal|PPO sequential \(-\d+%\))\n", block)


def test_the_template_names_no_winner_where_episodes_of_one_seed_overlap(cells, tmp_path):
    def run(mode, reward):
        copy = copy_run(cells[f"ppo_{mode}"], tmp_path / f"{mode}_{reward}", config={"env.name": COINRUN})
        evaluate_as(copy, COINRUN, test=reward)  # ± 0.5
        return copy

    near = as_template(Comparison.load([run("sequential", 6.0), run("parallel", 6.5)]))
    assert re.search(r"Evaluation, unseen levels +6\.00 +6\.50 +none: intervals overlap\n", near)
    far = as_template(Comparison.load([run("sequential", 5.0), run("parallel", 7.0)]))
    assert re.search(r"Evaluation, unseen levels +5\.00 +7\.00 +PPO parallel \(\+40%\)\*\n", far)
    assert "* one seed: no interval" in far


def test_markdown_shows_names_as_they_are():
    assert escape_markdown("a|b<script>*x*`") == "a\\|b&lt;script&gt;\\*x\\*\\`"
