"""The matrix: done once, killed and resumed, refused, failed, one cell at a time."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from helpers.commands import CELL_SETTINGS, MATRIX, ROOT, environment, rlcb
from helpers.forked import Command
from helpers.stand_ins import StandIns

from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.tools.analysis.runs import UnusableRunError, load_run
from rl_cluster_benchmark.tools.benchmark.cell_table import CellTable
from rl_cluster_benchmark.tools.benchmark.cells import CellProgress, look_at, work_on
from rl_cluster_benchmark.tools.benchmark.matrix import Matrix, build, load

TIMES = ("fps", "speedup", "memory", "seconds", "runs")  # columns that differ from one time to the next


def table(directory):
    with open(directory / "comparison.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: value for key, value in row.items() if not any(name in key for name in TIMES)} for row in rows]


def test_a_benchmark_trains_evaluates_and_reports_every_cell(benchmarked):
    names = [f"{a}_{m}_Catch-v0_seed1" for a in ("ppo", "a2c") for m in ("sequential", "parallel")]
    for name in names:
        run = load_run(benchmarked / "cells" / name)
        assert run.state == "finished"
        assert run.evaluations["all"].num_episodes == 20
    printed = (benchmarked / "benchmark.log").read_text()
    assert "4 of 4 cells done" in printed
    assert "COMPARISON: Catch-v0" in printed
    for file in ("report.html", "report.md", "comparison.png", "comparison.csv", "comparison.json"):
        assert (benchmarked / file).stat().st_size > 500, file
    assert [row["variant"] for row in table(benchmarked)] == [
        "PPO sequential", "PPO parallel", "A2C sequential", "A2C parallel",
    ]  # fmt: skip


def start(output):
    call = ["benchmark", *MATRIX, *CELL_SETTINGS, "--output-dir", output]
    return Command(call, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, start_new_session=True)


def wait_until_training(cell):
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            if len(load_run(cell).series["step"]) > 1:
                return
        except UnusableRunError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"{cell} does not start")


@pytest.mark.timeout(900)
@pytest.mark.long
def test_killed_in_the_middle_and_resumed_it_ends_with_the_same_table(benchmarked, tmp_path):
    """SIGKILL while the second cell trains: it is trained anew, the first one is not."""
    output = tmp_path / "matrix"
    process = start(output)
    try:
        wait_until_training(output / "cells" / "ppo_parallel_Catch-v0_seed1")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
    finally:
        process.kill()
        process.wait()
    first = output / "cells" / "ppo_sequential_Catch-v0_seed1" / "checkpoints" / "ppo_sequential_final.pt"
    before = first.stat().st_mtime_ns
    done = rlcb("benchmark", "--resume", "--output-dir", output, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert first.stat().st_mtime_ns == before
    assert table(output) == table(benchmarked)


def test_a_signal_ends_it_in_good_order(tmp_path):
    output = tmp_path / "matrix"
    process = start(output)
    try:
        cell = output / "cells" / "ppo_sequential_Catch-v0_seed1"
        wait_until_training(cell)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert load_run(cell).state in ("interrupted", "finished")
    finally:
        process.kill()
        process.wait()


def test_an_evaluation_of_somebody_in_a_cell_displaces_none_of_the_benchmark(benchmarked, tmp_path, call):
    """One with more episodes, and another way of acting, is neither reported nor taken for a missing one."""
    directory = shutil.copytree(benchmarked, tmp_path / "copy")
    cell = directory / "cells" / "ppo_sequential_Catch-v0_seed1"
    checkpoint = cell / "checkpoints" / "ppo_sequential_final.pt"
    more = ("--num-episodes", 30, "--deterministic", "--json", cell / "eval_mine.json")
    assert call("evaluate", "--checkpoint", checkpoint, *more)[0] == 0
    own = (cell / "evaluation_all.json").stat().st_mtime_ns
    status, out, error = call("benchmark", "--resume", "--output-dir", directory)
    assert (status, "4 of 4 cells done" in out) == (0, True), out + error
    assert (cell / "evaluation_all.json").stat().st_mtime_ns == own, "played again"
    assert "sampled actions" not in out
    assert table(directory) == table(benchmarked)


def test_an_existing_benchmark_is_not_touched_without_being_told(benchmarked):
    done = rlcb("benchmark", *MATRIX, *CELL_SETTINGS, "--output-dir", benchmarked)
    assert done.returncode == 2
    assert "already holds a benchmark. Add --resume" in done.stderr
    done = rlcb("benchmark", "--seeds", 7, "--duration", 1, "--resume", "--output-dir", benchmarked)
    assert done.returncode == 2
    assert "holds another benchmark" in done.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--duration", 1, "--games", "pong"), "games.0 = pong is not a known environment"),
        (("--duration", 1, "--algorithms", "dqn"), "dqn_sequential_coinrun_seed1: command line: algorithm = 'dqn'"),
        (("--duration", 1, "--seeds", 1, 1), "would hold"),
        (("--duration", -1), "duration_hours"),
        (
            ("--duration", 1, "--episodes", 0),
            "argument --episodes: 0 is not allowed; it must be a whole number of at least 1",
        ),
        (("--games", "coinrun"), "Say how long each run trains"),
        (("--duration", 1, "--configs", "nothing"), "Config file nothing does not exist"),
        (("--duration", 1, "--configs", "quickstart", "--modes", "parallel"), "Give either --configs or"),
        (("--duration", 1, "--set", "training.gama=1"), "training.gama is not a known key"),
        (("--resume",), "There is no benchmark in"),
    ],
)
def test_mistakes_are_found_before_anything_starts(args, text, tmp_path):
    done = rlcb("benchmark", *args, "--output-dir", tmp_path / "matrix")
    assert done.returncode == 2, done.stdout
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "matrix").exists()


def test_one_cell_at_a_time_as_on_a_cluster(benchmarked, tmp_path):
    """--plan lists the cells; two jobs at once each do theirs; the last call finds all done and reports."""
    output = tmp_path / "matrix"
    call = (
        "--algorithms", "ppo", "a2c", "--modes", "sequential", "--games", "Catch-v0", "--seeds", 1,
        "--total-timesteps", 6000, "--episodes", 20, *CELL_SETTINGS,
    )  # fmt: skip
    done = rlcb("benchmark", *call, "--output-dir", output, "--plan")
    assert done.returncode == 0, done.stderr
    assert "0  ppo_sequential_Catch-v0_seed1" in done.stdout
    assert "sbatch --array=0-1" in done.stdout
    job = ["benchmark", "--resume", "--output-dir", output, "--cell"]
    jobs = [
        Command([*job, cell], cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
        for cell in ("0", "a2c_sequential_Catch-v0_seed1")
    ]
    assert [job.wait(timeout=120) for job in jobs] == [0, 0]
    assert not (output / "report.html").exists()
    done = rlcb("benchmark", "--resume", "--output-dir", output)
    assert done.returncode == 0, done.stderr
    rows = {row["algorithm"]: row["final_reward"] for row in table(output)}
    whole = {row["algorithm"]: row["final_reward"] for row in table(benchmarked) if row["mode"] == "sequential"}
    assert rows == whole
    done = rlcb("benchmark", "--resume", "--output-dir", output, "--cell", 9)
    assert done.returncode == 2
    assert "there is no such cell" in done.stderr


def test_a_cell_that_fails_is_named_and_the_others_go_on(tmp_path):
    for name, rate in (("diverging", 1e38), ("sound", 1e-3)):
        (tmp_path / f"{name}.yaml").write_text(f"algorithm: ppo\ntraining: {{learning_rate: {rate}}}\n")
    output = tmp_path / "matrix"
    done = rlcb(
        "benchmark", "--configs", tmp_path / "diverging.yaml", tmp_path / "sound.yaml", "--games", "Catch-v0",
        "--seeds", 1, "--total-timesteps", 1000, "--episodes", 5, *CELL_SETTINGS, "--output-dir", output,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert re.search(r"Failed: diverging_Catch-v0_seed1: .* became NaN or infinite", done.stdout)
    assert "Traceback" not in done.stdout
    assert [row["variant"] for row in table(output)] == ["PPO sequential"]
    (left_out,) = json.loads((output / "comparison.json").read_text())["left_out"]
    assert left_out["run"].endswith("diverging_Catch-v0_seed1")
    assert "NaN or infinite" in left_out["reason"]


def test_the_board_knows_that_steps_may_end_a_timed_cell():
    """With both a duration and a number of steps, from what finished cells took."""
    matrix = Matrix(algorithms=["ppo"], modes=["sequential"], games=["Catch-v0"], seeds=[1, 2, 3],
                    duration_hours=1.0, total_timesteps=1000)  # fmt: skip
    cells = [CellProgress(cell, Path(cell.name)) for cell in matrix.cells()]
    assert CellTable(cells, matrix).seconds_left() > 3 * 3600
    cells[0].state, cells[0].seconds = "done", 20.0
    assert CellTable(cells, matrix).seconds_left() == pytest.approx(40.0)


def test_a_cell_that_was_only_evaluated_took_its_training_too(benchmarked, tmp_path):
    """What it tells the board of the time that others will take."""
    matrix = load(benchmarked)
    cell = matrix.cells()[0]
    directory = shutil.copytree(benchmarked / "cells" / cell.name, tmp_path / cell.name)
    summary = json.loads((directory / "training_summary.json").read_text())
    (directory / "training_summary.json").write_text(json.dumps(summary | {"duration_hours": 0.5}))
    progress = CellProgress(cell, directory)
    work_on(progress, matrix, Signals(), lambda: None, keep_partial=False)
    assert progress.state == "done"
    assert progress.seconds >= 1800


def test_the_board_estimates_the_end(benchmarked, tmp_path):
    """From what cells of the same variant took; done cells take nothing more."""
    matrix = load(benchmarked)
    cells = [look_at(cell, benchmarked / "cells" / cell.name, matrix) for cell in matrix.cells()]
    assert {progress.state for progress in cells} == {"done"}
    board = CellTable(cells, matrix)
    assert board.status() == "4 of 4 cells done"
    cells[0].seconds, cells[1].seconds, cells[2].seconds = 10.0, 20.0, 30.0
    cells[3].state = "to come"
    assert board.seconds_left() == pytest.approx(20.0)  # no cell of its variant is done: the mean of all
    half = shutil.copytree(benchmarked / "cells" / cells[0].cell.name, tmp_path / "half")
    good = json.loads((half / "evaluation_all.json").read_text())
    origin = good["origin"] | {"checkpoint": good["origin"]["checkpoint"] | {"digest": "0" * 64}}
    for other in (good | {"origin": origin}, good | {"origin": None}):  # bug 4: of another agent, or nobody knows
        (half / "evaluation_all.json").write_text(json.dumps(other))
        assert look_at(cells[0].cell, half, matrix).state == "to come"
    (half / "evaluation_all.json").write_text(json.dumps(good))
    assert look_at(cells[0].cell, half, matrix).state == "done"
    os.unlink(half / "evaluation_all.json")
    assert look_at(cells[0].cell, half, matrix).state == "to come"  # without its evaluation it is not done


def test_odd_names_of_a_benchmark(tmp_path):
    """The line that --plan prints for sbatch runs what it says; names that no directory should have are refused."""
    config, output = "my config $(touch touched).yaml", "it's $(touch touched)"
    (tmp_path / config).write_text("algorithm: ppo\n")
    call = ("--games", "Catch-v0", "--seeds", 1, "--total-timesteps", 600, "--output-dir", output, "--plan")
    plan = rlcb("benchmark", "--configs", config, *call, cwd=tmp_path)
    assert plan.returncode == 0, plan.stderr
    tools = StandIns(tmp_path / "bin")
    tools.add("sbatch", '#!/bin/bash\n[ "$1 $2" = "--array=0-0 --wrap" ] && bash -c "$3"\n')
    tools.add("rlcb")
    environ = environment() | {"PATH": tools.path, "SLURM_ARRAY_TASK_ID": "7"}
    subprocess.run(["bash", "-c", plan.stdout.splitlines()[-1]], cwd=tmp_path, env=environ, check=True, timeout=60)
    assert tools.calls("rlcb") == [["benchmark", "--resume", "--output-dir", output, "--cell", "7"]]
    assert not list(tmp_path.rglob("touched"))
    for name in ("a\x1b[31m", "two\nlines", "x" * 240):
        with pytest.raises(UserError, match="A cell cannot be called") as error:
            build(configs=[f"{name}.yaml"], games=["Catch-v0"], seeds=[1], total_timesteps=600)
        assert str(error.value).isprintable()


def test_an_error_does_not_drive_the_terminal(tmp_path):
    done = rlcb("compare", "no\x1b]0;title\x07such", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.removesuffix("\n").isprintable()
