"""What a run inherits from whoever starts it: closed streams, readers that do not read, limits, signals, folders."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from harness import ROOT, SIZES, WORKERS
from helpers.processes import is_alive

from rl_cluster_benchmark.kernels import build

long = pytest.mark.long
BLOCKED = (
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [1, 2, 10, 15, 17]); "
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
)
SUBREAPER = "import ctypes, subprocess, sys; ctypes.CDLL(None).prctl(36, 1); sys.exit(subprocess.call(sys.argv[1:]))"
# How bash starts the command "$@"; what is said of it in its output.
QUICK = {
    "closed streams": 'exec "$@" <&- >&- 2>&-',
    "small limits": 'ulimit -n 64; ulimit -c 0; ulimit -s unlimited; exec "$@"',
    "no folders, C locale": "unset HOME XDG_CACHE_HOME TERM; "
    "export LC_ALL=POSIX PYTHONIOENCODING=ascii PYTHONCOERCECLOCALE=0 PYTHONUTF8=0 TMPDIR=/nonexistent; "
    'export PYTHONHASHSEED=1 OMP_NUM_THREADS=garbage; umask 077; exec "$@"',
}
SLOW = {
    "a full disk for the output": 'exec "$@" > /dev/full 2>&1',
    "a reader who leaves": 'set -o pipefail; "$@" 2>&1 | head -1',
    "umask 000": 'umask 000; exec "$@"',
    "umask 777": 'umask 777; exec "$@"',
    "no assertions": 'export PYTHONOPTIMIZE=2; exec "$@"',
    "one core": f'exec taskset -c {min(os.sched_getaffinity(0))} nice -n 19 "$@"',
    "a home that is not there": 'export HOME=/proc/nobody; unset XDG_CACHE_HOME; exec "$@"',
    "a subreaper": f'exec {shlex.quote(sys.executable)} -c {shlex.quote(SUBREAPER)} "$@"',
}


def command(output, steps, *more, parallel=True):
    args = (*SIZES, "--total-timesteps", steps, "--output-dir", output, *more)
    args += ("--mode", "parallel", *WORKERS) if parallel else ()
    return [sys.executable, "-m", "rl_cluster_benchmark", "train", *map(str, args)]


def environment(tmp_path):
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}


def in_bash(script, call, tmp_path, **streams):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | streams
    return subprocess.Popen(["bash", "-c", script, "bash", *call], env=environment(tmp_path), cwd=ROOT, **pipes)


def state(output):
    return json.loads((output / "training_summary.json").read_text())["state"]


@pytest.mark.parametrize("how", [*QUICK, *(pytest.param(how, marks=long) for how in SLOW)])
def test_a_run_goes_its_way(how, tmp_path):
    """And its files hold what they should: nothing was printed into them."""
    output = tmp_path / "run"
    process = in_bash((QUICK | SLOW)[how], command(output, 2000), tmp_path)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert "Traceback" not in text
    assert state(output) == "finished"
    lines = (output / "logs" / "PPO_Parallel" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == list(range(1, len(lines) + 1))
    assert len(lines) >= 4
    assert (output / "config.yaml").stat().st_mode & 0o400, "its owner may read it, whatever the umask"


def updates(output, label):
    file = output / "logs" / label / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_blocked_signals_and_a_pipe_that_nobody_reads(tmp_path):
    """The run goes on, without what it cannot say; SIGTERM ends it in good order all the same."""
    output = tmp_path / "run"
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while True:
        try:
            os.write(writing, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(writing, True)
    script = f'exec {shlex.quote(sys.executable)} -c {shlex.quote(BLOCKED)} "$@"'
    process = in_bash(script, command(output, 10**8), tmp_path, stdout=writing, stderr=writing)
    try:
        wait_for(lambda: updates(output, "PPO_Parallel") > 3, process)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert state(output) == "interrupted"
        deadline = time.monotonic() + 20
        while any(map(is_alive, workers)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        os.close(reading)
        os.close(writing)


def test_a_current_directory_that_is_gone(tmp_path):
    script = 'cd $TMPDIR && mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    process = in_bash(script, command(tmp_path / "run", 2000), tmp_path)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert text == "error: The directory that this was started in has been removed; go to another with cd.\n"


@long
def test_a_screen_that_is_stopped(needs_pty, tmp_path):
    """Ctrl-S on a terminal, and nobody who reads it: the bar stands still, the run does not."""
    output = tmp_path / "run"
    master, slave = os.openpty()
    os.write(master, b"\x13")
    process = in_bash('exec "$@"', command(output, 10**8, parallel=False), tmp_path, stdout=slave, stderr=slave)
    try:
        wait_for(lambda: updates(output, "PPO_Sequential") > 200, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 128 + signal.SIGINT
        assert state(output) == "interrupted"
    finally:
        process.kill()
        os.close(master)
        os.close(slave)


@long
def test_a_limit_of_file_sizes(tmp_path):
    """It holds for shared memory and for logs: a sentence says so."""
    for parallel in (True, False):
        output = tmp_path / str(parallel)
        process = in_bash('ulimit -f 8; exec "$@"', command(output, 20_000, parallel=parallel), tmp_path)
        text, _ = process.communicate(timeout=120)
        assert process.returncode in (1, 2), text
        assert "ulimit -f" in text or "File too large" in text
        assert "Traceback" not in text


CACHE = """
import sys
from rl_cluster_benchmark.kernels import build
library = build.load()
print(library is not None)
"""


def load(environ, count=1):
    call = [sys.executable, "-c", CACHE]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen(call, env=os.environ | environ, cwd=ROOT, **pipes) for _ in range(count)]
    return [process.communicate(timeout=240)[0] for process in started]


@pytest.mark.skipif(build.load() is None, reason="needs a C compiler")
def test_the_cache_of_compiled_code(tmp_path):
    """Two compile it at once; half a library is never loaded; without a place for it there is one sentence."""
    cache = tmp_path / "cache"
    environ = {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    for text in load(environ, count=2):
        assert text == "True\n"
    (library,) = (cache / "rl_cluster_benchmark").iterdir()
    whole = library.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", whole[:-100] + bytes(100)):
        library.write_bytes(damaged)
        assert load(environ) == ["True\n"]
        assert library.read_bytes()[:4] == whole[:4]
        assert len(library.read_bytes()) > len(damaged) - 1
    (text,) = load(environ | {"XDG_CACHE_HOME": "/proc/nothing"})
    sentence, answer = text.splitlines()
    assert answer == "True"
    assert "cannot be kept" in sentence
    assert "XDG_CACHE_HOME" in sentence
