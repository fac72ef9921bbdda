"""What deletes or replaces: who is refused beside whom, what goes, and what stays whatever is asked for."""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from helpers.commands import CELL_SETTINGS, MATRIX, ROOT, TINY, environment, rlcb, tiny_run
from helpers.forked import Command
from matplotlib.figure import Figure

from rl_cluster_benchmark.cli.arguments import config_from
from rl_cluster_benchmark.cli.main import build_parser
from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.core.atomic_files import remove_leftovers
from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError
from rl_cluster_benchmark.core.stop import Signals
from rl_cluster_benchmark.run import checkpoint, resumption
from rl_cluster_benchmark.run.directory import RunDirectory, lock_file
from rl_cluster_benchmark.run.run import Run
from rl_cluster_benchmark.tools import quickstart
from rl_cluster_benchmark.tools.benchmark import matrix as matrices
from rl_cluster_benchmark.tools.benchmark import removal
from rl_cluster_benchmark.training.training import train

CELLS = ("ppo_sequential_Catch-v0_seed1", "ppo_sequential_Catch-v0_seed2")
SETTINGS = (
    "--algorithms", "ppo", "--modes", "sequential", "--games", "Catch-v0", "--seeds", 1, 2, "--episodes", 5,
    *CELL_SETTINGS,
)  # fmt: skip
LENGTH = ("--total-timesteps", 6000)


def begin(*args, variables=None):
    """`rlcb ARGS` in the background."""
    env = environment() | (variables or {})
    return Command(args, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def at_once(calls):
    """(status, what was printed) of each command, run side by side."""
    processes = [begin(*call) for call in calls]
    texts = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, texts, strict=True)]


@contextlib.contextmanager
def held_in_training(process, log):
    """Stop the run that this benchmark (or run) is training as soon as it is in its log; let it go on at the end."""
    trains = []
    try:
        deadline = time.monotonic() + 240
        while not (log.exists() and log.stat().st_size):
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        trains = [p for p in family if "train" in p.cmdline()]
        assert trains
        for train in trains:
            train.send_signal(signal.SIGSTOP)
        while any(train.status() != psutil.STATUS_STOPPED for train in trains):
            time.sleep(0.005)
        yield
    finally:
        for train in trains:
            train.send_signal(signal.SIGCONT)


def log_of(cell):
    return cell / "logs" / "PPO_Sequential" / "metrics.jsonl"


def contents(directory, but=(".lock",)):
    """Every file but the locks, with its content."""
    files = [file for file in directory.rglob("*") if file.is_file() and not file.name.endswith(but)]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def test_a_benchmark_that_is_running_is_left_alone(tmp_path):
    """Bug 3: --overwrite, --plan, --resume and --cell beside a running benchmark change nothing; it ends well."""
    output = tmp_path / "matrix"
    (tmp_path / "link").symlink_to(output)
    call = ("benchmark", *SETTINGS, "--output-dir")
    first = begin(*call, output, *LENGTH)
    try:
        with held_in_training(first, log_of(output / "cells" / CELLS[0])):
            before = contents(output)
            answers = at_once(
                [
                    (*call, output, *LENGTH, "--overwrite"),
                    (*call, tmp_path / "link", "--total-timesteps", 512, "--overwrite"),
                    ("benchmark", "--resume", "--output-dir", output),
                    ("benchmark", "--resume", "--output-dir", output, "--cell", 1),
                    (*call, output, *LENGTH, "--overwrite", "--cell", 1),
                    (*call, output, "--total-timesteps", 512, "--overwrite", "--plan"),
                ]
            )
            assert contents(output) == before
        *refused, planned = answers
        for status, text in refused:
            assert status == 2, text
            assert "Another process is working on the benchmark in" in text
            assert text.count("\n") == 1
        assert planned[0] == 0, planned[1]
        assert "--plan changes nothing. Without --plan, --overwrite removes: 1 cell (0 finished)." in planned[1]
        assert "--resume" not in planned[1]  # what it would go on with is another benchmark
        printed = first.communicate(timeout=240)[0]
        assert first.returncode == 0, printed
        assert "2 of 2 cells done" in printed
    finally:
        first.kill()
        first.wait()


def test_a_cell_in_a_job_of_its_own_is_left_alone(tmp_path):
    """Bug 3: beside a job with --cell another cell may be worked on, and nothing else."""
    output = tmp_path / "matrix"
    call = ("benchmark", *SETTINGS, *LENGTH, "--output-dir", output)
    job = begin(*call, "--cell", 0)
    cells = [output / "cells" / name for name in CELLS]
    try:
        with held_in_training(job, log_of(cells[0])):
            before = contents(output)
            answers = at_once(
                [
                    (*call, "--overwrite"),
                    ("benchmark", "--resume", "--output-dir", output),
                    (*call, "--overwrite", "--cell", 0),
                    ("benchmark", "--resume", "--output-dir", output, "--cell", CELLS[0]),
                    (*call, "--cell", 1),
                    (*call, "--total-timesteps", 512, "--overwrite", "--cell", 1),
                ]
            )
            assert contents(output) == before
            for (status, text), sentence in zip(
                answers,
                (
                    *("Jobs with --cell are working on the benchmark in",) * 2,
                    *(f"Another job is working on the cell {CELLS[0]} of the benchmark in",) * 2,
                    "Jobs with --cell are working on the benchmark in",  # the plan is there: --resume is missing
                    "holds another benchmark",
                ),
                strict=True,
            ):
                assert status == 2, text
                assert sentence in text
                assert text.count("\n") == 1
            ((status, text),) = at_once([("benchmark", "--resume", "--output-dir", output, "--cell", 1)])
            assert status == 0, text
            assert (cells[1] / "evaluation_all.json").exists()
        printed = job.communicate(timeout=240)[0]
        assert job.returncode == 0, printed
        assert (cells[0] / "evaluation_all.json").exists()

        # And afterwards: --overwrite --cell replaces its own cell and no other.
        other, trained = contents(cells[1]), (cells[0] / "training_summary.json").stat().st_mtime_ns
        ((status, text),) = at_once([(*call, "--overwrite", "--cell", 0)])
        assert status == 0, text
        assert f"Removing the cell {CELLS[0]}." in text
        assert (cells[0] / "training_summary.json").stat().st_mtime_ns > trained
        assert contents(cells[1]) == other
    finally:
        job.kill()
        job.wait()


def test_a_benchmark_that_is_replaced_loses_what_it_wrote_and_nothing_else(tmp_path, benchmarked):
    """--overwrite removes runs, evaluations, logs and the report of the old plan; files of the user stay."""
    output = tmp_path / "matrix"
    subprocess.run(["cp", "-r", benchmarked, output], check=True)
    old = output / "cells" / "a2c_parallel_Catch-v0_seed1"
    mine = [output / "cells" / "notes.txt", output / "cells" / "mine" / "a.txt", old / "why.txt"]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("keep me")
    shutil.move(output / "cells", tmp_path / "elsewhere")
    (output / "cells").symlink_to(tmp_path / "elsewhere")  # a larger disk
    name = "ppo_sequential_Catch-v0_seed3"
    call = ("benchmark", *SETTINGS, "--seeds", 3, *LENGTH, "--output-dir", output, "--overwrite")
    before = contents(tmp_path)
    planned = rlcb(*call, "--plan")
    assert contents(tmp_path) == before, "bug 3: a plan removes nothing"
    assert "--overwrite removes: 4 cells (4 finished) and the report." in planned.stdout, planned.stderr
    done = begin(*call)
    try:
        with held_in_training(done, log_of(output / "cells" / name)):
            assert not (output / "report.html").exists()
            assert sorted(path.name for path in old.rglob("*")) == ["why.txt"]
            left = {path.name for path in (output / "cells").iterdir()}
            assert left == {"notes.txt", "mine", old.name, name, f"{name}.log"}
            assert [file.read_text() for file in mine] == ["keep me"] * 3
        text = done.communicate(timeout=240)[0]
    finally:
        done.kill()
        done.wait()
    assert done.returncode == 0, text
    assert f"Replacing the benchmark in {output}. Removing 4 cells (4 finished) and the report." in text
    assert f"These stay, for no run has written them: {old / 'why.txt'}" in text
    assert "1 of 1 cells done" in text


def test_a_run_in_a_cell_is_not_removed_while_it_goes_on(tmp_path):
    """Bug 3: a run that holds no benchmark's lock, as an orphan of a killed benchmark, holds its own."""
    output = tmp_path / "matrix"
    call = ("benchmark", *SETTINGS, *LENGTH, "--output-dir", output)
    assert rlcb(*call, "--plan").returncode == 0
    cell = output / "cells" / CELLS[1]
    run = begin("train", *TINY, "--total-timesteps", 6000, "--output-dir", cell)
    try:
        with held_in_training(run, log_of(cell)):
            before = contents(output)
            for more in ((), ("--cell", 1)):
                done = rlcb(*call, "--overwrite", *more)
                assert done.returncode == 2, done.stdout
                assert f"The run in {cell} is going on, and nothing was removed" in done.stderr
            assert contents(output) == before
        text = run.communicate(timeout=120)[0]
        assert run.returncode == 0, text
    finally:
        run.kill()
        run.wait()


def test_a_run_that_is_going_on_is_not_overwritten_under_any_name(tmp_path):
    """Nor are its checkpoints by a run that has only those in common with it; it ends well."""
    output = tmp_path / "run"
    (tmp_path / "link").symlink_to(output)
    tiny = ("train", *TINY, "--total-timesteps", 6000, "--set", "training.save_interval=1")
    run = begin(*tiny, "--output-dir", output)
    try:
        with held_in_training(run, log_of(output)):
            before = contents(output)
            apart = ("--log-dir", tmp_path / "logs", "--checkpoint-dir", output / "checkpoints")
            answers = at_once(
                [
                    (*tiny, "--output-dir", output, "--overwrite"),
                    (*tiny, "--output-dir", tmp_path / "link", "--overwrite"),
                    (*tiny, "--output-dir", os.path.relpath(output, ROOT), "--overwrite"),
                    (*tiny, *apart, "--overwrite"),
                    ("scaling", "--output-dir", output, "--overwrite", "--workers", 1),
                ]
            )
            assert contents(output) == before
        for status, text in answers:
            assert status == 2, text
            assert "in use by another run" in text
        assert "The checkpoints in" in answers[3][1]
        text = run.communicate(timeout=120)[0]
        assert run.returncode == 0, text
    finally:
        run.kill()
        run.wait()


def test_of_two_runs_that_start_in_the_same_new_directory_one_goes_on(tmp_path):
    output = tmp_path / "new" / "run"
    answers = sorted(at_once([("train", *TINY, "--total-timesteps", 20_000, "--output-dir", output)] * 2))
    assert [status for status, _ in answers] == [0, 2], answers
    assert "is in use by another run" in answers[1][1] or "already holds a run" in answers[1][1]


def test_files_of_results_replace_no_record(trained, tmp_path):
    """A file named by the user may replace results, but neither a run's record nor what the command reads."""
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, run], check=True)
    checkpoint, log = run / "checkpoints" / "ppo_sequential_final.pt", log_of(run)
    picture = tmp_path / "picture.png"
    picture.symlink_to(run / "training_summary.json")
    evaluate = ("evaluate", "--checkpoint", checkpoint, "--num-episodes", 1)
    two = ("compare", "--sequential", run, "--parallel", run)
    before = contents(tmp_path)
    answers = at_once(
        [
            (*evaluate, "--json", checkpoint),
            (*evaluate, "--json", run / "training_summary.json"),
            (*evaluate, "--json", run / "logs"),
            ("plot", "--log-file", log, "--output", log),
            ("plot", "--log-file", log, "--output", picture),
            (*two, "--report", run / "config.yaml"),
            ("compare", run, "--output", run / "metrics.json"),
        ]
    )
    assert contents(tmp_path) == before
    sentences = (
        "reads; name another one", "part of a run's own record", "is a directory; name a file",
        "reads; name another one", "part of a run's own record", "part of a run's own record",
        "part of a run's own record",
    )  # fmt: skip
    for (status, text), sentence in zip(answers, sentences, strict=True):
        assert status == 2, text
        assert sentence in text

    link = tmp_path / "link.json"
    (tmp_path / "real.json").write_text('{"mean_reward": 0}')
    link.symlink_to("real.json")
    answers = at_once(
        [
            (*evaluate, "--json", link),
            (*evaluate, "--json", "/dev/stdout"),
            ("plot", "--log-file", log, "--output", tmp_path / "curve"),
        ]
    )
    assert [status for status, _ in answers] == [0, 0, 0], answers
    assert link.is_symlink()
    assert '"num_episodes": 1' in (tmp_path / "real.json").read_text()
    assert '"mean_reward"' in answers[1][1]
    assert f"Saved {tmp_path / 'curve.png'}" in answers[2][1]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_reports_replace_only_reports(trained, tmp_path):
    """The files of a report have names of their own choice: somebody else's file of that name stays."""
    names = ("report.md", "comparison.csv", "comparison.png")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("mine")
    mine = tmp_path / "comparison_report.txt"
    mine.write_text("mine")
    two = ("compare", "--sequential", trained, "--parallel", trained)
    refused = [rlcb(*two, cwd=tmp_path / "comparison.png"), rlcb(*two, cwd=tmp_path)]
    refused += [rlcb("report", trained, "--output-dir", tmp_path / name) for name in names]
    for done in refused:
        assert done.returncode == 2, done.stdout
        assert "would be replaced, and this program has not written it" in done.stderr
    assert [(tmp_path / name / name).read_text() for name in names] == ["mine"] * 3
    assert mine.read_text() == "mine"
    for _ in range(2):
        assert rlcb("report", trained, "--output-dir", tmp_path / "report").returncode == 0


def test_pictures_of_somebody_stay(trained, tmp_path, call, monkeypatch):
    """That matplotlib has drawn a picture does not make it one of this program's; our own are replaced, older too."""
    run = shutil.copytree(trained, tmp_path / "run")
    log, folder = log_of(run), tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    plot = ("plot", "--log-file", log)
    commands = {
        log.with_name("metrics.png"): plot,
        folder / "comparison.png": ("report", run),
        Path("comparison.png"): ("compare", "--sequential", run, "--parallel", run),
        folder / "learning_curve.png": ("quickstart", "--output-dir", folder),
    }
    figure = Figure()
    for picture, command in commands.items():
        figure.savefig(picture)
        before = picture.read_bytes()
        status, _, error = call(*command)
        assert (status, "would be replaced, and this program has not written it" in error) == (2, True), command
        assert picture.read_bytes() == before
    picture = log.with_name("metrics.png")
    figure.savefig(picture, dpi=110)  # as older versions wrote them
    for _ in range(2):
        before = picture.read_bytes()
        status, _, error = call(*plot)
        assert (status, picture.read_bytes()[1:4]) == (0, b"PNG"), error
    assert b"Software\0rlcb " in before
    assert call(*plot, "--output", log.with_name("curves.svg"))[0] == 0


def test_files_of_somebody_else_in_the_output_directory(tmp_path):
    """They stay, whatever is asked for: a run that would have to replace one is refused."""
    config, same, figures = tmp_path / "config", tmp_path / "same", tmp_path / "figures"
    mine = {config / "config.yaml": "algorithm: ppo\n", same / "config.yaml": "", figures / "metrics.json": "{}"}
    for file, content in mine.items():
        file.parent.mkdir()
        file.write_text(content)
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    train = ("train", *TINY, "--total-timesteps", 512)
    answers = at_once(
        [
            (*train, "--config", config / "config.yaml", "--output-dir", config, "--overwrite"),
            (*train, "--output-dir", same, "--resume"),
            (*train, "--output-dir", figures),
            (*train, "--output-dir", tmp_path / "file", "--overwrite"),
            (*train, "--output-dir", tmp_path / "dangling", "--overwrite"),
        ]
    )
    refused = "would be replaced, and no run has written it"
    sentences = (refused, "--resume goes on with the run in", refused, *["File exists"] * 2)
    for (status, text), sentence in zip(answers, sentences, strict=True):
        assert status == 2, text
        assert sentence in text
    assert {file: file.read_text() for file in mine} == mine

    home = tmp_path / "home"
    others = [home / "notes.txt", home / ".editor.tmp", home / "checkpoints" / "other.pt", home / "logs" / "a.log"]
    for file in others:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    assert tiny_run(home, timesteps=512).returncode == 0
    replaced = tiny_run(home, "--overwrite", timesteps=512)
    assert replaced.returncode == 0, replaced.stderr
    assert f"Replacing the run in {home} when training begins: 1 checkpoint, metrics.jsonl" in replaced.stdout
    assert [file.read_text() for file in others] == ["mine"] * 4


def site(folder, name, text):
    """The variable with which every Python process finds this module first."""
    folder.mkdir()
    (folder / name).write_text(text)
    return {"PYTHONPATH": f"{folder}:{ROOT}"}


def test_nothing_is_removed_for_a_run_that_cannot_start(trained, tmp_path):
    """--overwrite with a config that is refused late: TensorBoard is missing, or memory is."""
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", trained, run], check=True)
    before = contents(run)
    call = ["train", *map(str, TINY), "--output-dir", str(run), "--overwrite"]
    missing = environment() | site(tmp_path / "site", "tensorboard.py", "raise ImportError\n")
    python = [sys.executable, "-m", "rl_cluster_benchmark"]
    without = subprocess.run([*python, *call], cwd=ROOT, env=missing, capture_output=True, text=True, timeout=240)
    too_large = rlcb(*call, "--num-envs", 65536, "--set", "training.n_steps=65536")
    for done, sentence in ((without, "tensorboard is not installed"), (too_large, "A rollout of")):
        assert done.returncode == 2, done.stdout
        assert sentence in done.stderr
        assert contents(run) == before


@pytest.mark.parametrize(
    ("gone", "how"),
    [
        ("while it is locked", "resume_if_present"),
        ("while it is locked", "overwrite"),
        ("when it is looked at", "resume_if_present"),
        ("when it is looked at", "overwrite"),
        ("when checkpoints are looked for", "resume_if_present"),
    ],
)
def test_a_run_whose_disk_is_away_while_another_starts_is_not_removed(trained, tmp_path, monkeypatch, gone, how):
    """The directory is moved away and comes back, as that of a disk that is unmounted for a moment."""
    run, elsewhere = tmp_path / "disk" / "run", tmp_path / "elsewhere"
    run.parent.mkdir()
    subprocess.run(["cp", "-r", trained, run], check=True)
    before = contents(run)

    def unmount():
        run.parent.rename(elsewhere)
        run.parent.mkdir()

    def mount():
        shutil.rmtree(run.parent)
        elsewhere.rename(run.parent)

    def around(owner, name, first=lambda: None, then=lambda: None):
        real = getattr(owner, name)

        def call(*args, **more):
            monkeypatch.setattr(owner, name, real)
            first()
            try:
                return real(*args, **more)
            finally:
                then()

        monkeypatch.setattr(owner, name, call)

    if gone == "while it is locked":
        around(RunDirectory, "claim", first=unmount)
    elif gone == "when it is looked at":
        around(RunDirectory, "claim", then=unmount)
    else:
        around(checkpoint, "newest", then=lambda: around(checkpoint, "newest", first=unmount))
    around(Run, "start", first=lambda: mount() if elsewhere.exists() else None)
    call = ["train", *map(str, TINY), "--total-timesteps", "8000", "--output-dir", str(run)]
    config = config_from(build_parser().parse_args(call))
    with pytest.raises(TrainingFailedError, match=r"has taken over|changed while this run was starting"):
        train(config, Signals(), **{how: True})
    if elsewhere.exists():
        mount()
    assert contents(run).items() >= before.items(), "nothing of the run is gone"


def test_a_filesystem_without_locks(tmp_path):
    """A live run of this machine is found all the same: it has the lock file open."""
    without = site(
        tmp_path / "site",
        "sitecustomize.py",
        "import errno, fcntl\ndef flock(*args):\n    raise OSError(errno.ENOLCK, 'No locks available')\n"
        "fcntl.flock = flock\n",
    )
    output = tmp_path / "run"
    call = ("train", *TINY, "--output-dir", output, "--total-timesteps", 6000)
    run = begin(*call, variables=without)
    try:
        with held_in_training(run, log_of(output)):
            before = contents(output, ())
            done = rlcb(*call, "--overwrite", variables=without)
            assert done.returncode == 2, done.stdout
            assert "is in use by another run" in done.stderr
            assert contents(output, ()) == before
        text = run.communicate(timeout=120)[0]
        assert run.returncode == 0, text
    finally:
        run.kill()
        run.wait()


def test_workers_keep_no_lock_of_a_run_that_was_killed(tmp_path):
    output = tmp_path / "run"
    run = begin(
        "train", *TINY, "--mode", "parallel", "--num-workers", 2, "--set", "parallel.num_envs_per_worker=null",
        "--output-dir", output,
    )  # fmt: skip
    family = []
    try:
        log, deadline = output / "logs" / "PPO_Parallel" / "metrics.jsonl", time.monotonic() + 240
        while not log.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        family = psutil.Process(run.pid).children(recursive=True)
        for process in family:
            process.suspend()
        run.kill()
        run.wait()
        assert any(process.is_running() for process in family)
        for lock in (output / ".lock", output / "checkpoints" / ".ppo_parallel.lock"):
            descriptor = lock_file(lock)
            assert descriptor is not None
            os.close(descriptor)
    finally:
        run.kill()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        run.communicate()


def test_a_lock_whose_file_is_removed_while_it_is_waited_for(tmp_path):
    """Who waits gets the lock of the file that has the name then, not of one that has none any more."""
    path = tmp_path / "run" / ".lock"
    first = lock_file(path)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lock_file, path, patience=60)
        time.sleep(0.3)
        assert not waiting.done()
        shutil.rmtree(path.parent)
        os.close(first)
        second = waiting.result()
    assert os.path.samestat(os.fstat(second), os.stat(path))
    assert lock_file(path) is None
    os.close(second)


def test_temporary_files_of_live_processes_stay(tmp_path):
    host, nobody = socket.gethostname(), subprocess.Popen(["true"])
    nobody.wait()
    with subprocess.Popen(["sleep", "60"]) as alive:
        live = [f".config.yaml.{host}-{alive.pid}.tmp", ".config.yaml.elsewhere-7.tmp", ".editor.tmp", ".a.b.c-d.tmp"]
        dead = [f".config.yaml.{host}-{nobody.pid}.tmp", ".metrics.json.elsewhere-7.tmp"]
        for name in live + dead:
            (tmp_path / name).touch()
        os.utime(tmp_path / dead[1], (0, 0))
        remove_leftovers(tmp_path)
        alive.kill()
    assert {file.name for file in tmp_path.iterdir()} == set(live)


def test_runs_of_another_algorithm_are_somebody_s_too(call, tmp_path):
    """In a directory for one run, of whatever algorithm, nothing of another one goes unless that is asked for."""
    for number, name in enumerate(("checkpoints/impala_parallel_final.pt", "logs/IMPALA_Parallel/metrics.jsonl")):
        output = tmp_path / str(number)
        file = output / name
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        train = ("train", *TINY, "--total-timesteps", 512, "--output-dir", output)
        status, _, error = call(*train)
        assert status == 2
        assert "already holds a run" in error
        status, _, error = call(*train, "--resume-if-present")
        assert status == 2
        assert f"There is no run in {output} to go on with" in error
        assert file.read_text() == "{}"
        place = RunDirectory.of(configs.build({}, {"output_dir": str(output)}, source="test"))
        assert place.contents() == ("1 checkpoint", "metrics.jsonl")[number]
        place.remove_run()
        assert not file.exists()


def test_a_run_that_is_removed_leaves_nothing_of_its_own(trained, tmp_path):
    """Nor a damaged checkpoint, nor evaluations when its summary is gone; a file of nobody's run stays."""
    run = shutil.copytree(trained, tmp_path / "run")
    place = RunDirectory.of(configs.load(run / "config.yaml", {"output_dir": str(run)}))
    of_it = '{"mean_reward": 1, "origin": {"run_id": "gone"}}'
    for name in ("ppo_sequential_step_7.pt.damaged", "other.pt.damaged"):
        (place.checkpoints / name).touch()
    (run / "evaluation.json").write_text(of_it)
    place.summary.unlink()
    place.remove_run()
    assert not (run / "evaluation.json").exists()
    assert [file.name for file in place.checkpoints.iterdir() if file.name[0] != "."] == ["other.pt.damaged"]
    (run / "evaluation.json").write_text(of_it)
    place.remove_run()  # no run is here that it could be of
    assert (run / "evaluation.json").exists()
    config = configs.load(trained / "config.yaml", {"output_dir": str(run)})
    place.config.write_text(configs.to_yaml(config))
    assert resumption.check(config, place, must_exist=True) is not None


def test_a_cell_that_is_a_link_leads_no_removal_elsewhere(benchmarked, tmp_path):
    """Nor does a name in a plan."""
    output, elsewhere = tmp_path / "matrix", tmp_path / "elsewhere"
    shutil.copytree(benchmarked, output)
    cell = output / "cells" / "ppo_sequential_Catch-v0_seed1"
    cell.rename(elsewhere)
    cell.symlink_to(elsewhere)
    before = contents(elsewhere, ())
    assert removal.what_goes(output, [cell]) == "the report"
    with removal.runs_locked([cell]):
        removal.remove_cells([cell])
    assert not cell.is_symlink()
    assert contents(elsewhere, ()) == before
    plan = output / "benchmark.yaml"
    for name in ("../../ppo", ".ppo"):
        plan.write_text(plan.read_text().replace("- ppo", f"- {name}", 1))
        with pytest.raises(UserError, match="A cell cannot be called"):
            matrices.load(output)
        plan.write_text((benchmarked / "benchmark.yaml").read_text())


def test_a_cell_that_is_removed_leaves_no_evaluation(benchmarked, tmp_path):
    cells = shutil.copytree(benchmarked / "cells", tmp_path / "cells")
    (cells / "a2c_parallel_Catch-v0_seed1" / "evaluation.json").write_text('{"mean_reward": 1, "origin": null}')
    removed = [cell for cell in cells.iterdir() if cell.is_dir()]
    for cell in removed:
        evaluation = (cell / "evaluation_all.json").read_text()
        (cell / "eval of mine.json").write_text(evaluation)  # of the same run
        (cell / "evaluation_test.json").write_text("{")
    removal.remove_cells(removed)
    assert list(cells.iterdir()) == []


def test_finished_cells_are_not_put_under_another_plan(benchmarked, tmp_path, call):
    """Without benchmark.yaml nobody knows how they were trained: only --overwrite goes on, and --plan says so."""
    output = shutil.copytree(benchmarked, tmp_path / "matrix")
    (output / "benchmark.yaml").unlink()
    two = ("benchmark", *MATRIX, *CELL_SETTINGS, "--total-timesteps", 999, "--output-dir", output)
    before = contents(output)
    for more in (("--resume",), ("--resume", "--cell", 0), ("--overwrite", "--cell", 0), ("--plan",)):
        status, _, error = call(*two, *more)
        assert status == 2, more
        assert f"{output} holds runs of a benchmark, but no benchmark.yaml" in error
    status, printed, _ = call(*two, "--overwrite", "--plan")
    assert status == 0
    assert "Without --plan, --overwrite removes: 4 cells (4 finished) and the report." in printed
    assert contents(output) == before
    status, _, error = call("benchmark", "--resume", "--plan", "--output-dir", tmp_path / "typo")
    assert status == 2
    assert "There is no benchmark in" in error
    assert not (tmp_path / "typo").exists()


def test_a_benchmark_whose_report_would_be_refused_does_not_train(benchmarked, tmp_path, call):
    """With --resume too; and a damaged evaluation is written again."""
    output = shutil.copytree(benchmarked, tmp_path / "matrix")
    cell = output / "cells" / "ppo_sequential_Catch-v0_seed1"
    (cell / "evaluation_all.json").write_text('{"mean_rew')
    report = (output / "report.md").read_text()
    (output / "report.md").write_text("mine")
    resume = ("benchmark", "--resume", "--output-dir", output)
    status, printed, error = call(*resume)
    assert status == 2
    assert "cells done" not in printed
    assert "report.md would be replaced" in error
    assert (cell / "evaluation_all.json").read_text() == '{"mean_rew'
    (output / "report.md").write_text(report)
    done = rlcb(*resume)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 cells done" in done.stdout


def test_a_quickstart_replaces_only_a_quickstart(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "runs" / "quickstart")
    before = contents(tmp_path)
    done = rlcb("quickstart", cwd=tmp_path)
    assert done.returncode == 2
    assert "already holds a run" in done.stderr
    assert contents(tmp_path) == before


def test_a_quickstart_with_other_levels_is_no_quickstart(tmp_path):
    mine = configs.load("quickstart", {"output_dir": str(tmp_path), "training.duration_hours": 0.01})
    directory = RunDirectory.of(mine)
    for changes, replaced in (({}, True), ({"env.num_levels": 500}, False), ({"env.start_level": 7}, False)):
        there = configs.load("quickstart", {"training.duration_hours": 0.01} | changes)
        directory.config.write_text(configs.to_yaml(there))
        assert quickstart._holds_a_quickstart(directory, mine) == replaced


def test_copies_of_checkpoints_are_their_owners(trained, tmp_path, call):
    """Neither the pruning of old checkpoints nor --overwrite removes what somebody has kept under another name."""
    output = tmp_path / "run"
    shutil.copytree(trained, output)
    checkpoints = output / "checkpoints"
    names = ["ppo_sequential_best.pt", "ppo_sequential_step_9_keep.pt", "ppo_sequential_step_best.pt"]
    for name in names:
        shutil.copy(checkpoints / "ppo_sequential_final.pt", checkpoints / name)
    saves = ("--set", "training.save_interval=1", "--set", "logging.keep_checkpoints=1")
    assert tiny_run(output, "--resume", *saves, timesteps=6000).returncode == 0
    assert len(list(checkpoints.glob("ppo_sequential_step_[0-9]*[0-9].pt"))) == 1
    assert all((checkpoints / name).exists() for name in names)
    assert tiny_run(output, "--overwrite", timesteps=600).returncode == 0
    assert sorted(file.name for file in checkpoints.glob("*.pt")) == sorted(["ppo_sequential_final.pt", *names])
    # Copies alone are no run: there is nothing to resume.
    (checkpoints / "ppo_sequential_final.pt").unlink()
    (output / "config.yaml").unlink()
    (output / "logs" / "PPO_Sequential" / "metrics.jsonl").unlink()
    status, _, err = call("train", "--resume", "--output-dir", output)
    assert (status, "There is no run in" in err) == (2, True)


def test_checkpoints_of_a_run_elsewhere_are_left_alone(tmp_path, call, monkeypatch):
    """Without --output-dir two runs with different --log-dir have one place for checkpoints."""
    monkeypatch.chdir(tmp_path)
    run = ("train", *TINY, "--total-timesteps", 600)
    assert call(*run, "--log-dir", "one")[0] == 0
    before = contents(tmp_path)
    for how in (("--seed", 2, "--overwrite"), ("--resume",), ("--resume-if-present",)):
        status, _, err = call(*run, "--total-timesteps", 1200, "--log-dir", "two", *how)
        assert (status, "are of the run in one/PPO_Sequential, not of two/PPO_Sequential" in err) == (2, True), err
        assert contents(tmp_path) == before
    assert call(*run, "--seed", 2, "--log-dir", "one", "--overwrite")[0] == 0
    shutil.rmtree(tmp_path / "one")
    assert call(*run, "--seed", 3, "--log-dir", "two", "--overwrite")[0] == 0


def test_a_run_that_cannot_be_removed_as_a_whole_stays(trained, tmp_path, call, monkeypatch):
    """One of its directories may belong to somebody else: the checkpoints must not go before that is noticed."""
    output = tmp_path / "run"
    shutil.copytree(trained, output)
    before = contents(output)
    touch = Path.touch

    def refuse(self, *args, **kwargs):
        if self.parent == output / "logs" / "PPO_Sequential":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        touch(self, *args, **kwargs)

    monkeypatch.setattr(Path, "touch", refuse)
    status, _, err = call("train", *TINY, "--total-timesteps", 600, "--output-dir", output, "--overwrite")
    assert (status, f"Cannot write {output / 'logs' / 'PPO_Sequential'} (Permission denied)" in err) == (1, True), err
    assert contents(output) == before
