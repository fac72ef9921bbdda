"""SLURM itself: three nodes, jobs submitted and followed, cancelled, signalled, preempted and requeued."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from conftest import (
    FOREVER,
    RLCB,
    ROOT,
    TINY,
    Processes,
    check_run,
    environment,
    need,
    ssh_settings,
    updates,
    wait_until,
)
from slurm_cluster import SlurmCluster

from rl_cluster_benchmark.tools.launch import jobs
from rl_cluster_benchmark.tools.launch.slurm import Slurm


@pytest.fixture(scope="module")
def slurm():
    need("slurmctld", "slurmd", "munged", "sbatch")
    if os.geteuid() != 0:
        pytest.skip("starting SLURM's daemons needs root")
    home, started = Path(tempfile.mkdtemp(prefix="rlcb-slurm-")), Processes()
    try:
        cluster = SlurmCluster(home, started)
        wait_until(cluster.ready, 60, "SLURM with three idle nodes", home / "slurmctld.log")
        yield cluster
        cluster.ask("scancel", "--user=root")
        wait_until(lambda: not cluster.ask("squeue", "-h"), 60, "an empty queue")
    finally:
        started.end()
        shutil.rmtree(home)


@pytest.fixture(autouse=True)
def idle(slurm):
    wait_until(slurm.ready, 90, "three idle nodes", slurm.home / "slurmctld.log")


def submit(slurm, tmp_path, output, *args, nodes=2, options=(), follow=False):
    call = [sys.executable, "-m", "rl_cluster_benchmark", "launch", "slurm", "--nodes", nodes, "--cpus-per-node", 1,
            "--log", tmp_path / "job-%j.log", "--script", tmp_path / "job.sh", *options,
            *(["--follow"] if follow else []), "--", "train", *TINY, "--master-addr", "127.0.0.1", "--output-dir",
            output, *args]  # fmt: skip
    done = subprocess.run(
        list(map(str, call)), cwd=ROOT, env=environment(**slurm.environ), capture_output=True, text=True, timeout=200
    )
    job = done.stdout.split()[1] if done.stdout.startswith("Job ") else None
    return done, job


def log_of(tmp_path, job):
    return tmp_path / f"job-{job}.log"


def state(slurm, job):
    return slurm.ask("squeue", "-h", "-j", job, "-o", "%T")


def test_three_nodes_followed_to_the_end(slurm, tmp_path):
    done, job = submit(slurm, tmp_path, tmp_path / "run", "--total-timesteps", 4000, nodes=3, follow=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TRAINING SUMMARY" in done.stdout
    assert f"job {job} is RUNNING" in done.stderr
    check_run(tmp_path / "run", nodes=3)


def test_a_wrong_input_is_reported(slurm, tmp_path):
    done, job = submit(slurm, tmp_path, tmp_path / "run", "--set", "model.architecture=nature", follow=True)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nature needs images" in done.stdout
    assert "Attempt 1" not in done.stdout, f"job {job} is not tried again"


def test_usr1_saves_and_requeues_and_the_run_goes_on(slurm, tmp_path):
    output = tmp_path / "run"
    _, job = submit(slurm, tmp_path, output, "--total-timesteps", FOREVER)
    wait_until(lambda: updates(output) > 5, 120, "training", log_of(tmp_path, job))
    slurm.ask("scancel", "--signal=USR1", job)
    wait_until(lambda: "back into the queue" in log_of(tmp_path, job).read_text(), 60, "requeue", log_of(tmp_path, job))
    before = updates(output)
    wait_until(lambda: updates(output) > before + 5, 120, "going on", log_of(tmp_path, job))
    assert "Resumed from" in log_of(tmp_path, job).read_text()
    slurm.ask("scancel", job)
    wait_until(lambda: not state(slurm, job), 60, "the end", log_of(tmp_path, job))
    check_run(output, nodes=2, state="interrupted")


def test_overwrite_holds_until_the_old_run_is_gone(slurm, tmp_path):
    """Bugs 7 and 8: an attempt that fails before training leaves --overwrite to the next; a requeued job resumes."""
    output = tmp_path / "run"
    old = [*RLCB, "train", "--mode", "distributed", *TINY, "--num-nodes", 1, "--total-timesteps", 3000, "--output-dir",
           output]  # fmt: skip
    subprocess.run(list(map(str, old)), cwd=ROOT, env=environment(), check=True, timeout=120)
    before = updates(output)
    python = tmp_path / "python"  # an environment that is broken at first
    python.write_text(f'#!/bin/bash\nmkdir {tmp_path}/tried-$SLURM_PROCID && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    args = ("--total-timesteps", FOREVER, "--overwrite")
    _, job = submit(slurm, tmp_path, output, *args, options=("--python", python))
    log = log_of(tmp_path, job)
    wait_until(lambda: updates(output) > before + 3, 120, "training", log)
    assert "Attempt 0 ended with status 1." in log.read_text()
    assert "Resumed from" not in log.read_text(), "these are the old run's weights"
    slurm.ask("scancel", "--signal=USR1", job)
    wait_until(lambda: "Resumed from" in log.read_text(), 120, "the requeued job", log)
    before = updates(output)
    wait_until(lambda: updates(output) > before + 3, 120, "going on", log)
    slurm.ask("scancel", job)
    wait_until(lambda: not state(slurm, job), 60, "the end", log)
    check_run(output, nodes=2, state="interrupted")


def test_scancel_ends_it_for_good(slurm, tmp_path):
    output = tmp_path / "run"
    _, job = submit(slurm, tmp_path, output, "--total-timesteps", FOREVER)
    wait_until(lambda: updates(output) > 3, 120, "training", log_of(tmp_path, job))
    slurm.ask("scancel", job)
    wait_until(lambda: not state(slurm, job), 60, "the end", log_of(tmp_path, job))
    check_run(output, nodes=2, state="interrupted")
    time.sleep(10)
    assert not state(slurm, job), "it did not come back"
    assert "back into the queue" not in log_of(tmp_path, job).read_text()


def test_preemption_by_a_better_partition(slurm, tmp_path):
    output = tmp_path / "run"
    _, job = submit(slurm, tmp_path, output, "--total-timesteps", FOREVER, nodes=3, options=("--partition", "low"))
    wait_until(lambda: updates(output) > 5, 120, "training", log_of(tmp_path, job))
    urgent = slurm.ask(
        "sbatch", "--parsable", "-p", "high", "-N", 3, "--exclusive", "-o", "/dev/null", "--wrap", "sleep 5"
    )
    wait_until(lambda: state(slurm, urgent) == "RUNNING", 60, "the better job", log_of(tmp_path, job))
    before = updates(output)
    wait_until(lambda: updates(output) > before + 5, 150, "going on", log_of(tmp_path, job))
    slurm.ask("scancel", job)
    wait_until(lambda: not state(slurm, job), 60, "the end", log_of(tmp_path, job))
    check_run(output, nodes=3, state="interrupted")


def test_a_killed_node_process_is_tried_again_in_the_allocation(slurm, tmp_path):
    output = tmp_path / "run"
    _, job = submit(slurm, tmp_path, output, "--total-timesteps", FOREVER)
    wait_until(lambda: updates(output) > 5, 120, "training", log_of(tmp_path, job))
    before = updates(output)
    nodes = [p for p in psutil.process_iter(["cmdline"]) if str(output) in (p.info["cmdline"] or []) and is_node(p)]
    assert len(nodes) == 2
    nodes[1].kill()
    wait_until(lambda: "Attempt 0 ended" in log_of(tmp_path, job).read_text(), 90, "the end", log_of(tmp_path, job))
    wait_until(lambda: updates(output) > before + 3, 120, "going on", log_of(tmp_path, job))
    slurm.ask("scancel", job)
    wait_until(lambda: not state(slurm, job), 60, "the end", log_of(tmp_path, job))
    check_run(output, nodes=2, state="interrupted")


def test_a_lost_node_sends_the_job_to_others(slurm, tmp_path):
    """The node's daemon and all its processes are gone at once, as when a machine loses power."""
    output = tmp_path / "run"
    _, job = submit(slurm, tmp_path, output, "--total-timesteps", FOREVER)
    wait_until(lambda: updates(output) > 5, 120, "training", log_of(tmp_path, job))
    assert slurm.ask("squeue", "-h", "-j", job, "-o", "%N") == "node[1-2]"
    slurm.kill_node("node2")
    try:
        before = updates(output)
        wait_until(lambda: updates(output) > before + 5, 200, "going on elsewhere", log_of(tmp_path, job))
        assert "Resumed from" in log_of(tmp_path, job).read_text()
        assert slurm.ask("squeue", "-h", "-j", job, "-o", "%N") == "node[1,3]"
        slurm.ask("scancel", job)
        wait_until(lambda: not state(slurm, job), 60, "the end", log_of(tmp_path, job))
        check_run(output, nodes=2, state="interrupted")
    finally:
        slurm.start_node("node2")


def is_node(process):
    return process.info["cmdline"][:1] == [sys.executable]


def test_one_command_as_a_job(slurm, tmp_path, monkeypatch):
    """What the benchmark sends each cell of its matrix with."""
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = jobs.JobOptions(name="cell", log=str(tmp_path / "cell-%j.log"), directory=str(ROOT), cpus_per_node=1)
    system = Slurm()
    job = jobs.submit(system, ["config", "--env", "maze"], options, tmp_path / "cell.sh")
    wait_until(lambda: system.state(job) is None, 60, "the end of the job")
    assert system.status(job) == 0
    assert "procgen-maze-v0" in system.log_file(job, options).read_text()


def test_the_doctor_in_a_job_script(slurm, tmp_path):
    """A plain call asks srun for a task on each node."""
    log = tmp_path / "doctor.log"
    call = f"env PYTHONPATH={ROOT} {sys.executable} -m rl_cluster_benchmark doctor --cluster --master-addr 127.0.0.1"
    job = slurm.ask("sbatch", "--parsable", "-N", 2, "--ntasks-per-node=1", "-o", log, "--wrap", f"cd {ROOT} && {call}")
    wait_until(lambda: not state(slurm, job), 90, "the end of the job", log)
    assert "All-reduce of 2.5 MB over 2 machines" in log.read_text()
    assert "ExitCode=0:0" in slurm.ask("scontrol", "show", "job", job)


def test_the_pbs_script_through_a_qsub_that_is_not_pbs(slurm, processes, tmp_path):
    """SLURM's qsub reads #PBS lines but is no PBS. It sets no PBS_NODEFILE: two loopback addresses stand in."""
    need("qsub")
    output, hosts = tmp_path / "run", tmp_path / "hosts"
    config, options = ssh_settings(tmp_path, Port=2299, ListenAddress="127.0.0.2")
    with config.open("a") as file:
        file.write("ListenAddress 127.0.0.3\n")
    processes.start(["/usr/sbin/sshd", "-D", "-f", config], tmp_path / "sshd.log")
    hosts.write_text("127.0.0.2\n127.0.0.2\n127.0.0.3\n")
    words = [word for option in (*options, "Port=2299") for word in ("--ssh-option", option)]
    call = [sys.executable, "-m", "rl_cluster_benchmark", "launch", "pbs", "--nodes", 2, "--cpus-per-node", 1, "--time",
            "3600", "--option=-v PYTHONPATH", "--hosts", hosts, "--env", "PYTHONPATH", *words, "--directory", tmp_path,
            "--script", tmp_path / "job.sh", "--log", tmp_path / "job.log", "--", "train", *TINY, "--output-dir",
            output, "--total-timesteps", FOREVER]  # fmt: skip
    environ = environment(**slurm.environ)
    done = subprocess.run(list(map(str, call)), cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1].partition(".")[0]
    wait_until(lambda: updates(output) > 5, 120, "training")
    slurm.ask("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: not state(slurm, job), 60, "the end of the first job")
    before = updates(output)
    wait_until(lambda: updates(output) > before + 5, 120, "going on in a second job")
    (second,) = slurm.ask("squeue", "-h", "-o", "%i").split()
    slurm.ask("scancel", "--signal=TERM", "--batch", second)
    wait_until(lambda: not state(slurm, second), 60, "the end")
    check_run(output, nodes=2, state="interrupted")
    assert not slurm.ask("squeue", "-h"), "a job that was ended by hand is not submitted again"
    assert "Resumed from" in (tmp_path / "job.log").read_text()


def test_odd_names_are_what_sbatch_reads(slurm, tmp_path):
    """Each stands in one directive, and is to SLURM what it was on the command line; times by SLURM's own rules."""
    names = ("two words", "it's", 'a "quote"', "$(touch touched)", "a; touch touched #", "#hash", "%j", "back\\slash",
             "Größe", "-dash", "x" * 300)  # fmt: skip
    times = (("1", "00:01:00"), ("90:30", "01:31:00"), ("2-12", "2-12:00:00"), ("1-02:30", "1-02:30:00"),
             ("100:00:00", "4-04:00:00"), *[(None, "UNLIMITED")] * 6)  # fmt: skip
    held = zip(names, times, strict=True)
    for number, (name, (text, expected)) in enumerate(held):
        folder = tmp_path / (name if not set("\\%") & set(name) and len(name) < 200 else f"folder {number}")
        folder.mkdir()
        call = [*RLCB, "launch", "slurm", "--nodes", "1", f"--job-name={name}", "--option=--hold",
                f"--directory={folder}", *([f"--time={text}"] if text else []), "--", "train"]  # fmt: skip
        environ = environment(**slurm.environ)
        done = subprocess.run(call, cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        job = done.stdout.split()[1]
        try:
            shown = slurm.ask("scontrol", "show", "job", job)
            assert f"JobName={name}\n" in shown, shown
            assert f"StdOut={folder}/rlcb-{job}.out\n" in shown, shown
            assert f"its output goes to {folder}/rlcb-{job}.out" in done.stdout
            assert f" TimeLimit={expected} " in shown, shown
        finally:
            slurm.ask("scancel", job)
    assert not list(tmp_path.rglob("touched"))
    wait_until(lambda: not slurm.ask("squeue", "-h"), 60, "an empty queue")
