"""A launch that starts its command again: it goes on with the run that it began, and never with an older one."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from helpers.commands import ROOT, environment, rlcb
from helpers.forked import Command
from helpers.machines import FOREVER, TINY, metrics, summary
from helpers.stand_ins import NOTE, SSH, StandIns

LAUNCHED = (*TINY, "--workers-per-node", 1, "--set", "training.save_interval=2", "--set", "training.log_interval=1")


@pytest.fixture
def tools(needs_pty, tmp_path):
    tools = StandIns(tmp_path / "bin")
    tools.add("ssh", SSH)
    return tools


@pytest.fixture
def start(tools, tmp_path):
    """Start `rlcb` or bash in the background, output in a file; whatever the test does, all is gone afterwards."""
    started = []

    def begin(*call, **environ):
        log = tmp_path / f"log{len(started)}"
        begun = subprocess.Popen if call[0] == "bash" else Command
        with log.open("wb") as file:
            process = begun(
                list(map(str, call)), cwd=tmp_path, env=environment() | {"PATH": tools.path} | environ, stdout=file,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process, log

    yield begin
    for process in started:
        end(process)


def end(process):
    """As a machine that loses its power: all at once."""
    for member in [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []:
        with contextlib.suppress(psutil.Error):
            member.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition, process, log, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


def updates(output):
    file = output / "logs" / "PPO_Distributed" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run as distributed runs leave it, not to be changed."""
    output = tmp_path_factory.mktemp("finished") / "run"
    args = ("--num-nodes", 1, "--total-timesteps", 3000, "--output-dir", output)
    done = rlcb("train", "--mode", "distributed", *LAUNCHED, *args)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture
def old_run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def nodes_of(process):
    """By their ranks; SLURM numbers its one itself."""
    found = {}
    for member in psutil.Process(process.pid).children(recursive=True):
        words = member.cmdline()
        if words[1:4] == ["-m", "rl_cluster_benchmark", "train"]:
            found[int(words[words.index("--node-rank") + 1]) if "--node-rank" in words else 0] = member
    return found


def launch_ssh(*train, hosts="localhost"):
    return (
        "launch", "ssh", "--hosts", hosts, "--directory", ROOT, "--", "train", *LAUNCHED, *train,
    )  # fmt: skip


def test_an_attempt_that_never_began_leaves_the_old_run_to_the_next(start, tools, old_run):
    """Bug 8: --overwrite holds until an attempt has replaced the old run; from then on attempts resume."""
    output, old_updates = old_run, updates(old_run)
    (tools.folder / "fail").touch()
    process, log = start(*launch_ssh("--overwrite", "--total-timesteps", FOREVER, "--output-dir", output))
    wait_until(lambda: updates(output) > old_updates + 2, process, log)
    assert "Ended: localhost with status 1." in log.read_text(), "the first attempt"
    assert "Resumed from" not in log.read_text(), "these are the old run's weights"
    nodes_of(process)[0].kill()
    wait_until(lambda: "Step: " in log.read_text().partition("Resumed from")[2], process, log)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM, log.read_text()
    assert log.read_text().count("Restart ") == 2
    lines = metrics(output)
    assert [line["update"] for line in lines] == list(range(1, len(lines) + 1))
    assert summary(output)["state"] == "interrupted"


def test_a_second_attempt_does_not_take_a_run_that_nobody_gave_it(start, tools, old_run):
    """Bug 8: without --resume or --overwrite a run that was there is refused, by a later attempt as by the first."""
    output, old_updates = old_run, updates(old_run)
    (tools.folder / "fail").touch()
    process, log = start(*launch_ssh("--total-timesteps", FOREVER, "--output-dir", output))
    assert process.wait(120) == 2, log.read_text()
    assert "already holds a run" in log.read_text()
    assert updates(output) == old_updates


def test_no_other_machine_begins_a_run_anew_that_is_on_the_disk_of_the_head(start, tools, tmp_path):
    """The first machine is lost for good; another one would start at the beginning, or take an old run."""
    output = tmp_path / "run"
    args = ("--set", "cluster.shared_filesystem=false", "--set", "cluster.min_nodes=1", "--output-dir", output)
    process, log = start(*launch_ssh(*args, "--total-timesteps", FOREVER, hosts="localhost,127.0.0.1"))
    wait_until(lambda: updates(output) > 2, process, log)
    before = updates(output)
    (tools.folder / "localhost").touch()
    nodes_of(process)[0].kill()
    assert process.wait(120) == 1, log.read_text()
    assert "The first machine, localhost, does not answer, and the run is on its disk alone" in log.read_text()
    assert "Restart" not in log.read_text()
    assert updates(output) >= before


# srun [options] COMMAND: one task on this machine. If there is a file `fail`, it does not start.
SRUN = """\
#!/bin/bash
here=$(dirname "$0")
while [[ $1 = --* ]]; do shift; done
rm "$here/fail" 2>/dev/null && exit 1
export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_JOB_NODELIST=localhost
exec "$@"
"""


def test_a_slurm_job_replaces_the_old_run_once(start, tools, old_run, tmp_path):
    """Bugs 7 and 8: when its first attempt never began, the second one overwrites; after a requeue it goes on."""
    for name, body in (("sbatch", NOTE + "print(17)"), ("srun", SRUN), ("scontrol", NOTE), ("sleep", NOTE)):
        tools.add(name, body)
    (tools.folder / "fail").touch()
    output, old_updates = old_run, updates(old_run)
    call = ["launch", "slurm", "--nodes", 1, "--directory", ROOT, "--log", tmp_path / "job.log", "--", "train",
            *LAUNCHED, "--overwrite", "--total-timesteps", FOREVER, "--output-dir", output]  # fmt: skip
    submit, said = start(*call)
    assert submit.wait(60) == 0, said.read_text()
    script = tools.calls("sbatch")[-1][-1]

    process, log = start("bash", script, SLURM_JOB_ID="17")
    wait_until(lambda: updates(output) > old_updates + 2, process, log)
    assert "Attempt 0 ended with status 1." in log.read_text()
    assert "Resumed from" not in log.read_text(), "these are the old run's weights"
    nodes_of(process)[0].send_signal(signal.SIGUSR1)  # as before the time limit
    assert process.wait(60) == 138, log.read_text()
    assert tools.calls("scontrol") == [["requeue", "17"]]
    before = updates(output)

    process, log = start("bash", script, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1")
    wait_until(lambda: updates(output) > before + 2, process, log)
    assert "Resumed from" in log.read_text()


class PbsJob:
    """A job script of `rlcb launch pbs`, to be run by bash as PBS runs it; qsub takes notes."""

    def __init__(self, start, tools, folder, *train, name="rlcb"):
        self.start, self.hosts = start, folder / "hosts"
        self.hosts.write_text("localhost\n")
        call = ["launch", "pbs", "--nodes", 1, "--job-name", name, "--directory", ROOT, "--log", folder / "job.log",
                "--", "train", *LAUNCHED, *train]  # fmt: skip
        done = rlcb(*call, cwd=folder, variables={"PATH": tools.path}, timeout=60)
        assert done.returncode == 0, done.stderr
        self.script = Path(folder, tools.calls("qsub")[-1][-1])
        self._spooled = shutil.copy(self.script, folder / f"spooled-{len(tools.calls('qsub'))}")  # as PBS does
        self._log, self._output = folder / "job.log", []

    def run(self):
        process, output = self.start("bash", self._spooled, PBS_JOBID="1.server", PBS_NODEFILE=str(self.hosts))
        self._output.append(output)
        return process

    def read_text(self):
        """All that the job has printed, wherever to."""
        return "".join(file.read_text() for file in (self._log, *self._output) if file.exists())


def test_a_pbs_job_that_runs_again_goes_on(start, tools, old_run, tmp_path):
    """Bug 7: PBS runs the same script again after a lost node (-r y), and --overwrite is not done a second time."""
    tools.add("qsub", NOTE + 'print("1.server")')
    output, old_updates = old_run, updates(old_run)
    job = PbsJob(start, tools, tmp_path, "--overwrite", "--total-timesteps", FOREVER, "--output-dir", output)
    process = job.run()
    wait_until(lambda: updates(output) > old_updates + 2, process, job)
    assert "Resumed from" not in job.read_text()
    end(process)
    process = job.run()
    wait_until(lambda: job.read_text().count("Output: ") == 2, process, job)
    wait_until(lambda: "Step: " in job.read_text().rpartition("Output: ")[2], process, job)
    assert "Resumed from" in job.read_text(), "what the first attempt had learned is gone"
    os.kill(process.pid, signal.SIGUSR1)  # as before the time limit
    assert process.wait(60) == 138, job.read_text()
    assert "Still running" not in job.read_text(), "the node has not heard what was typed for it"
    assert summary(output)["state"] == "interrupted"
    (_, again) = tools.calls("qsub")
    assert again[-1] == str(job.script)
    assert again[:2] == ["-v", "RLCB_JOB"], "the submitted job finds what this one began"


def test_a_preempted_job_of_two_of_one_folder_submits_itself_again(start, tools, tmp_path):
    """Bug 6: saved before its time limit, the first job hands in its own run to go on, not the second one's."""
    tools.add("qsub", NOTE + 'print("1.server")')
    places = [tmp_path / name for name in ("a", "b")]
    jobs = [PbsJob(start, tools, tmp_path, "--total-timesteps", FOREVER, "--output-dir", place) for place in places]
    process = jobs[0].run()
    wait_until(lambda: any(updates(place) > 2 for place in places), process, jobs[0])
    os.kill(process.pid, signal.SIGUSR1)
    assert process.wait(60) == 138, jobs[0].read_text()
    assert [updates(place) > 2 for place in places] == [True, False]
    again = tools.calls("qsub")
    assert len(again) == 3
    assert f"--output-dir {places[0]}" in Path(again[2][-1]).read_text()


def test_two_jobs_of_one_folder_submit_themselves_again(start, tools, tmp_path):
    """Bug 6: the second job's script does not take the first one's place."""
    tools.add("qsub", NOTE + 'print("1.server")')
    jobs = [PbsJob(start, tools, tmp_path, "--output-dir", tmp_path / name) for name in ("a", "b")]
    assert jobs[0].script != jobs[1].script
    for job, mine, other in zip(jobs, "ab", "ba", strict=True):
        text = job.script.read_text()
        assert str(tmp_path / mine) in text
        assert str(tmp_path / other) not in text
        assert str(job.script) in text
