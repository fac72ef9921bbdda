"""Job scripts of `rlcb launch slurm|pbs`: the files they are, and names that users give, run by a real bash."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from helpers.commands import rlcb
from helpers.stand_ins import NOTE, StandIns

from rl_cluster_benchmark.cli import main

SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}
SYSTEMS = pytest.mark.parametrize("system", SUBMIT)
# Each would do something if a shell, a batch system or a file system took it for more than a name.
ODD = (
    "two words", "it's", 'a "quote"', "$(touch touched)", "`touch touched`", "a; touch touched #", "%j %%", "#hash",
    "-dash", "back\\slash", "Größe 火", "x" * 300, "~", "*", "a && touch touched", "${HOME}",
)  # fmt: skip
FORBIDDEN = (
    "a\n#SBATCH --wrap=x", "a\n#PBS -N x", "a\ntouch touched", "a\rb", "a\tb", "a\x1b[2Jb", "", "  ",
    "a\udcffb", "a\x85b",
)  # fmt: skip


@pytest.fixture
def tools(tmp_path, monkeypatch):
    tools = StandIns(tmp_path / "bin")
    for name in SUBMIT.values():
        tools.add(name, NOTE + 'print("17")')
    for name in ("srun", "python-there"):
        tools.add(name)
    monkeypatch.setenv("PATH", tools.path)
    monkeypatch.chdir(tmp_path)
    return tools


def launch(capsys, *args):
    """(exit status, output, errors), as `rlcb launch` gives them."""
    try:
        status = main.main(["launch", *args])
    except SystemExit as end:  # argparse
        status = end.code
    return (status, *capsys.readouterr())


def run_script(script, folder):
    (folder / "job.sh").write_text(script)
    environ = os.environ | {"PBS_JOBID": "1.server", "PBS_NODEFILE": "nodes", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", "job.sh"], cwd=folder, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr


@SYSTEMS
def test_no_file_is_written_over(system, tools, tmp_path, capsys):
    """Bug 9: a job name that some file has, two jobs of one name, a --script that is there."""
    mine = tmp_path / "setup.sh"
    mine.write_text("precious")
    words = (system, "--nodes", "1")
    for _ in range(2):
        status, output, errors = launch(capsys, *words, "--job-name", "setup", "--", "train", "--output-dir", "a")
        assert status == 0, errors
        assert mine.read_text() == "precious"
        script = Path(tools.calls(SUBMIT[system])[-1][-1])
        assert script.parent == tmp_path
        assert f"submitted as {script.name};" in output
    scripts = {call[-1] for call in tools.calls(SUBMIT[system])}
    assert len(scripts) == 2
    assert all(Path(script).read_text().startswith("#!/bin/bash\n") for script in scripts)
    status, output, errors = launch(capsys, *words, "--script", "setup.sh", "--", "train", "--output-dir", "a")
    assert (status, output) == (2, "")
    assert errors == "error: setup.sh exists and stays as it is; choose another place with --script.\n"
    assert mine.read_text() == "precious"
    assert len(tools.calls(SUBMIT[system])) == 2
    tools.add(SUBMIT[system], "#!/bin/sh\necho no such queue >&2\nexit 1\n")
    before = set(tmp_path.iterdir())
    status, _, errors = launch(capsys, *words, "--script", "new.sh", "--", "train", "--output-dir", "a")
    assert (status, errors) == (2, f"error: {SUBMIT[system]} refused the job: no such queue\n")
    assert set(tmp_path.iterdir()) == before, "nothing is left of a job that was refused"


@SYSTEMS
@pytest.mark.parametrize("name", ODD)
def test_odd_names_arrive_as_they_are(system, name, tools, tmp_path, capsys):
    """In paths, in shell commands and in the train command."""
    folder = tmp_path / (name if len(name) < 200 else "long")
    folder.mkdir()
    log, script = f"log {name}"[:200], f"script {name}"[:200]
    paths = (f"--directory={folder}", f"--script={script}", f"--python={tools.folder / 'python-there'}")
    train = ("--", "train", f"--output-dir={name}", "--set", f"env.name={name}")
    status, output, errors = launch(
        capsys, system, "--nodes", "1", *paths, f"--log={log}", "--activate", f"export ODD={quoted(name)}", *train[:3]
    )
    if system == "slurm" and set("\\%") & set(name):
        assert (status, "would have another name" in errors) == (2, True)
        return
    assert status == 0, errors
    (call,) = tools.calls(SUBMIT[system])
    assert call[-1] == str(tmp_path / script)
    assert f"submitted as {script};" in output
    run_script(Path(script).read_text(), tmp_path)
    recorder = "srun" if system == "slurm" else "python-there"
    (arguments,) = tools.calls(recorder)
    assert f"--output-dir={name}" in arguments
    if system == "pbs":
        assert (folder / log).exists()
        assert f"--directory={folder}" in arguments
    assert not list(tmp_path.rglob("touched"))


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


@SYSTEMS
@pytest.mark.parametrize("option", ["--job-name", "--account", "--memory", "--partition"])
def test_odd_names_of_the_batch_system(system, option, tools, capsys):
    """SLURM's stand in one directive each (cluster_tests lets sbatch read them); PBS has no way to quote them."""
    option = "--queue" if (system, option) == ("pbs", "--partition") else option
    for name in ODD:
        args = (system, "--nodes", "1", f"{option}={name}", "--log", "job.log", "--dry-run", "--", "train")
        status, script, errors = launch(capsys, *args)
        plain = launch(capsys, *args[:3], f"{option}=plain", *args[4:])[1]
        if status == 0:
            different = [line for line in script.splitlines() if line not in plain.splitlines()]
            assert sum(line.startswith(("#SBATCH", "#PBS")) for line in different) == 1
            assert len(script.splitlines()) == len(plain.splitlines())
        else:
            assert (status, script, system) == (2, "", "pbs")
            assert errors.startswith(f"error: {option} ")


@SYSTEMS
def test_what_is_no_line_of_text_is_refused(system, tools, capsys):
    for option in ("--job-name", "--log", "--option", "--directory", "--python", "--script", "--account", "--memory"):
        for name in FORBIDDEN:
            status, output, errors = launch(capsys, system, "--nodes", "1", f"{option}={name}", "--", "train")
            assert (status, output) == (2, "")
            assert f"argument {option}: " in errors
            assert "is not allowed" in errors
            assert errors.replace("\n", "").isprintable()
    assert not tools.calls(SUBMIT[system])


def test_variables_have_names(tools, capsys):
    for text in ("", "A B", "=x", "A-B=s3cret", "$(x)", "1A"):
        status, _, errors = launch(capsys, "pbs", "--nodes", "1", f"--env={text}", "--dry-run", "--", "train")
        assert status == 2
        assert "s3cret" not in errors
    status, script, errors = launch(capsys, "pbs", "--nodes", "1", "--env=A=s3cret", "--dry-run", "--", "train")
    assert (status, script) == (2, ""), "others may read a job script"
    assert "--env A=... is not for PBS" in errors
    assert "s3cret" not in errors


def test_a_batch_system_that_says_nothing(tools, capsys):
    tools.add("sbatch", "#!/bin/sh\n")
    status, _, errors = launch(capsys, "slurm", "--nodes", "1", "--", "train", "--output-dir", "a")
    assert status == 2
    assert "gave no job number" in errors
    (script,) = re.findall(r"sbatch took (\S+\.sh)", errors)
    assert Path(script).is_file(), "a job may have it"
    Path(script).unlink()


def test_a_pbs_job_is_told_to_save_before_its_end(tools, tmp_path):
    """Bug 10: the script itself, by a bash whose clock is a thousand times as fast; --time 3600 is an hour."""
    tools.add("sleep", '#!/bin/bash\nexec /bin/sleep "$(awk "BEGIN { print $1 / 1000 }")"\n')
    tools.add("python-there", "#!/bin/bash\ntrap 'exit 138' USR1\nfor i in {1..600}; do /bin/sleep 0.1; done\n")
    call = ["launch", "pbs", "--nodes", 1, "--time", 3600, "--python", tools.folder / "python-there", "--script",
            "job.sh", "--log", "job.log", "--", "train", "--output-dir", "a"]  # fmt: skip
    assert rlcb(*call, cwd=tmp_path).returncode == 0
    environ = os.environ | {"PBS_JOBID": "1.server", "PBS_NODEFILE": "nodes"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=environ, timeout=60)
    assert done.returncode == 138
    assert "submitted again" in (tmp_path / "job.log").read_text()
    assert len(tools.calls("qsub")) == 2
