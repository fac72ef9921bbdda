"""`rlcb launch`: what can run on any machine. The real engines are driven by cluster_tests (make test-cluster)."""

import dataclasses
import os
import re
import signal
import subprocess

import psutil
import pytest
from helpers import processes
from helpers.commands import rlcb
from helpers.machines import FOREVER, TINY, metrics, nodes_of, summary

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.cluster import placement
from rl_cluster_benchmark.config.schema import Config
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.machine import detection
from rl_cluster_benchmark.tools.launch import jobs
from rl_cluster_benchmark.tools.launch.command import MODULE, TrainCommand
from rl_cluster_benchmark.tools.launch.local import shared_cores
from rl_cluster_benchmark.tools.launch.slurm import Slurm
from rl_cluster_benchmark.tools.launch.ssh import Host, read_hosts


def wait_for_updates(output, count, process):
    processes.wait_for_updates(output, "PPO_Distributed", count, process, seconds=200)


@pytest.mark.long
def test_a_killed_node_is_started_again_and_the_run_is_continuous(launched, tmp_path):
    output = tmp_path / "run"
    process = launched(
        "--nodes", 2, "--", "train", *TINY, "--workers-per-node", 1, "--total-timesteps", 15_000,
        "--output-dir", output, "--set", "training.save_interval=3",
    )  # fmt: skip
    wait_for_updates(output, 5, process)
    nodes_of(process)[1].kill()
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 0, text
    assert "[node 1] Waiting for 2 machines" in text
    assert "Restart 1 of 3, from the last checkpoint." in text
    assert "Resumed from" in text
    assert "Traceback" not in text
    done = summary(output)
    assert (done["state"], done["num_envs"]) == ("finished", 16)
    lines = metrics(output)
    assert [line["update"] for line in lines] == list(range(1, done["total_updates"] + 1))
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))


def test_a_signal_to_the_launcher_ends_all(launched, tmp_path):
    output = tmp_path / "run"
    process = launched(
        "--nodes", 2, "--", "train", *TINY, "--workers-per-node", 1, "--total-timesteps", FOREVER,
        "--output-dir", output,
    )  # fmt: skip
    wait_for_updates(output, 3, process)
    everybody = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=90)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert summary(output)["state"] == "interrupted"
    _, alive = psutil.wait_procs(everybody, timeout=5)
    assert not alive


def test_nodes_on_one_machine_share_its_cores(monkeypatch):
    machine = dataclasses.replace(detection.detect(), usable_cores=8)
    monkeypatch.setattr(detection, "detect", lambda: machine)

    def words(algorithm, **sections):
        return " ".join(shared_cores(Config.model_validate({"algorithm": algorithm} | sections), 2))

    assert words("ppo") == "--workers-per-node 4"
    assert words("ppo", parallel={"num_workers": 3}) == ""
    assert words("impala").startswith("--set impala.num_actors=2 --set impala.num_learners=2 ")
    assert "num_actors=1 --set impala.num_learners=3 " in words("impala", impala={"num_learners": 3})
    assert "num_actors=3 --set impala.num_learners=1 " in words("impala", parallel={"num_workers": 3})
    assert "num_actors=5 --set impala.num_learners=2 " in words("impala", impala={"num_actors": 5})


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("local", "--nodes", 2), "Say what to launch behind --"),
        (("local", "--nodes", 2, "--", "evaluate"), "Say what to launch behind --"),
        (("local", "--", "train", "--mode", "parallel"), "is for --mode distributed, not parallel"),
        (("local", "--", "train", "--node-rank", 1), "rlcb launch numbers the machines"),
        (("ssh", "--hosts", "/nowhere/hosts", "--", "train"), "The hosts file /nowhere/hosts does not exist"),
        (("slurm", "--nodes", 2, "--time", "soon", "--dry-run", "--", "train"), "--time soon is not understood"),
        (("pbs", "--nodes", 2, "--time", "1-00:00:00", "--dry-run", "--", "train"), "PBS writes it as HH:MM:SS"),
        (("local", "--nodes", 2, "--", "train", "--set", "cluster.min_nodes=3"), "is more than the 2 machines"),
        (("local", "--nodes", 2, "--", "train", "--set", "cluster.num_workers=3"), "rlcb launch says how many"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_with_a_sentence(args, sentence, tmp_path):
    done = rlcb("launch", *args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("num_nodes", [2, None])
def test_what_changes_from_attempt_to_attempt_is_not_set_for_all(num_nodes):
    """With --set it would hold for the machines that are left when one is lost, too."""
    words = ["train", "--env", "Catch-v0", "--set"]
    for key, remedy in (
        ("num_workers=3", "how many"),
        ("master_addr=a", "--master-addr"),
        ("master_port=2000", "port"),
    ):
        with pytest.raises(UserError, match=remedy):
            TrainCommand.parse([*words, f"cluster.{key}"], main.parse_train, num_nodes=num_nodes)
    command = TrainCommand.parse(
        ["train", "--env", "Catch-v0", "--master-addr", "a"], main.parse_train, num_nodes=num_nodes
    )
    later = command.for_node(0, num_nodes=1, address="b", port=2001)[len(MODULE) :]
    config = main.config_from(main.build_parser().parse_args(later))
    assert (config.cluster.num_workers, config.cluster.master_addr, config.cluster.master_port) == (1, "b", 2001)


@pytest.mark.parametrize("flag", ["--num-workers", "--num-nodes"])
def test_a_number_of_machines_that_are_not_started_is_refused(flag):
    """In distributed mode --num-workers means machines: whoever wants workers would get fewer without a word."""
    words = ["train", "--env", "Catch-v0", flag, "4"]
    with pytest.raises(UserError, match=r"4 machines behind -- are not the 2 .* said with --workers-per-node"):
        TrainCommand.parse(words, main.parse_train, num_nodes=2)
    assert TrainCommand.parse(words, main.parse_train, num_nodes=4).config.cluster.num_workers == 4


def test_slurm_script(tmp_path):
    done = rlcb(
        "launch", "slurm", "--nodes", 3, "--cpus-per-node", 8, "--time", "08:00:00", "--partition", "cpu", "--account",
        "me", "--memory", "16G", "--activate", "source venv/bin/activate", "--option=--exclusive", "--dry-run", "--",
        "train", "--env", "coinrun", "--output-dir", "a run", "--overwrite",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in ("--nodes=3", "--ntasks-per-node=1", "--cpus-per-task=8", "--time=08:00:00", "--partition=cpu",
                 "--account=me", "--mem=16G", "--requeue", "--signal=USR1@120", "--exclusive"):  # fmt: skip
        assert f"#SBATCH {line}\n" in done.stdout, line
    assert "source venv/bin/activate || exit 2" in done.stdout
    assert "--output-dir 'a run'" in done.stdout
    assert "--overwrite" in done.stdout
    assert_shell_accepts(done.stdout, tmp_path)


def test_pbs_script(tmp_path):
    done = rlcb(
        "launch", "pbs", "--nodes", 3, "--cpus-per-node", 8, "--time", "01:00:00", "--queue", "work", "--dry-run", "--",
        "train", "--env", "coinrun", "--output-dir", "runs/a",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in ("-l select=3:ncpus=8", "-l walltime=01:00:00", "-q work", "-r y", "-j oe"):
        assert f"#PBS {line}\n" in done.stdout, line
    assert "sleep 3480" in done.stdout
    assert_shell_accepts(done.stdout, tmp_path)


def assert_shell_accepts(script, tmp_path):
    (tmp_path / "job.sh").write_text(script)
    checked = subprocess.run(["bash", "-n", tmp_path / "job.sh"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_slurm_script_turns_statuses_into_requeues(tmp_path):
    """The generated script, run by bash, with srun and scontrol replaced by notes of how they were called.

    cluster_tests does the same with SLURM itself; this runs on every machine.
    """
    for name, body in {
        "srun": 'echo "$RLCB_JOB $@" >> calls; read -r status < statuses; sed -i 1d statuses; exit "$status"',
        "scontrol": 'echo "scontrol $@" >> calls',
        "sleep": ":",
    }.items():
        tool = tmp_path / name
        tool.write_text(f"#!/bin/bash\n{body}\n")
        tool.chmod(0o755)
    options = jobs.JobOptions(nodes=2, directory=str(tmp_path))
    command = TrainCommand.parse(
        ["train", "--overwrite", "--set", "cluster.max_restarts=2"], main.parse_train, num_nodes=2
    )
    (tmp_path / "job.sh").write_text(Slurm().distributed_script(command, options))

    def run(*statuses, restarts=0):
        (tmp_path / "calls").write_text("")
        (tmp_path / "statuses").write_text("".join(f"{status}\n" for status in statuses))
        environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "20007"}
        environ |= {"SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(["bash", tmp_path / "job.sh"], env=environ, capture_output=True, text=True, timeout=20)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    status, calls = run(0)
    assert (status, len(calls)) == (0, 1)
    assert "--overwrite" in calls[0]
    assert calls[0].endswith("--master-port 20007")
    status, calls = run(1, 1, 0)
    assert (status, len(set(calls)), len(calls)) == (0, 1, 3), "an attempt finds out by itself what it goes on with"
    assert calls[0].startswith(f"{command.job}-20007 "), "by this name"
    assert run(1, 1, 1)[0] == 1
    assert run(2) == (2, run(2)[1])
    assert len(run(2)[1]) == 1, "a wrong input is not tried again"
    assert len(run(1, 2, 0)[1]) == 3, "what was right at first is a port that is taken, a disk that cannot be read"
    assert len(run(2, 0, restarts=1)[1]) == 2
    assert "--wait=0" in calls[0], "a task that has ended well does not hurry one that is still writing"
    for preempted in (138, 143):
        status, calls = run(preempted, restarts=1)
        assert calls[0].startswith(f"{command.job}-20007 "), "the same name after a requeue"
        assert calls[1:] == ["scontrol requeue 20007"]


def test_hosts(tmp_path):
    file = tmp_path / "hosts.txt"
    file.write_text("# head first\nme@a addr=10.0.0.1 workers=4\nb\n\nb\n")
    assert read_hosts(str(file)) == [Host("me@a", "10.0.0.1", 4), Host("b", "b")]
    assert read_hosts("a,b") == [Host("a", "a"), Host("b", "b")]
    file.write_text("a slots=4")
    with pytest.raises(UserError, match="'slots=4' is not understood"):
        read_hosts(str(file))


SLURM_TIMES = {
    "45": 2700, "10:30": 630, "08:30:00": 30600, "100:00:00": 360_000, "2-12": 216_000, "1-02:30": 95_400,
    "1-02:00:30": 93_630, "90:00": 5400,
}  # fmt: skip
PBS_TIMES = {
    "3600": 3600,
    "90": 90,
    "10:30": 630,
    "01:00:00": 3600,
    "100:00:00": 360_000,
    "3600.500": 3600,
    "00:90:00": 5400,
}


@pytest.fixture
def dry_run(capsys):
    """(exit status, script, errors) of `rlcb launch SYSTEM`."""

    def run(system, *args, train=("--output-dir", "runs/a")):
        try:
            status = main.main(["launch", system, "--nodes", "2", "--dry-run", *args, "--", "train", *train])
        except SystemExit as end:  # argparse
            status = end.code
        return (status, *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    ("system", "text", "expected"),
    [("slurm", *item) for item in SLURM_TIMES.items()] + [("pbs", *item) for item in PBS_TIMES.items()],
)
def test_a_time_limit_is_read_by_the_systems_own_rules(system, text, expected, dry_run):
    """Bug 10: a number alone is minutes for SLURM, seconds for PBS; the script has a form that means one for both."""
    status, script, _ = dry_run(system, f"--time={text}")
    assert status == 0
    warning = min(120, expected // 2)
    hours, minutes, seconds = re.search(r"(?:--|wall)time=(\d+):(\d\d):(\d\d)\n", script).groups()
    assert int(hours) * 3600 + int(minutes) * 60 + int(seconds) == expected
    if system == "slurm":
        assert f"#SBATCH --signal=USR1@{warning}\n" in script
    else:
        assert f"    sleep {expected - warning} &" in script


@pytest.mark.parametrize("system", ["slurm", "pbs"])
@pytest.mark.parametrize(
    "text", ["soon", "", "1:2:3:4", "-5", "0", "00:00:00", "1h", "1:", ":1", "\u00b2", "1\n2", "1e3"]
)
def test_a_time_that_is_none_is_refused(system, text, dry_run):
    status, script, errors = dry_run(system, f"--time={text}")
    assert (status, script) == (2, "")
    assert "--time" in errors


def test_where_a_node_is():
    config = Config.model_validate({"mode": "distributed", "cluster": {"num_workers": 3, "master_addr": "h"}})
    assert placement.find(config, 2, {}).rank == 2
    assert placement.find(config, None, {}).rank is None
    with pytest.raises(UserError, match="--node-rank 3 is not one of 3 machines"):
        placement.find(config, 3, {})
    torchrun = {
        "TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "m",
        "MASTER_PORT": "5", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3",
    }  # fmt: skip
    found = placement.find(config, None, torchrun)
    assert (found.rank, found.num_nodes, found.master_addr, found.master_port) == (1, 2, "m", 5)
    assert found.store_is_there
    assert found.attempt == "x", "its count of restarts may differ between machines"
    with pytest.raises(UserError, match="--nproc-per-node 1"):
        placement.find(config, None, torchrun | {"LOCAL_WORLD_SIZE": "4"})
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[03-07,9],m1"}
    found = placement.find(config, None, slurm)
    assert (found.rank, found.num_nodes, found.master_addr, found.source) == (1, 2, "h", "SLURM")
    assert [placement.first_host(text) for text in ("n[03-07,9],m1", "a,b", "a", "n[1-2]-ib")] == [
        "n03",
        "a",
        "a",
        "n1-ib",
    ]
    assert placement.find(config, None, {"SLURM_JOB_NODELIST": "n1"}).source == "flags", "inside sbatch, but not srun"
