"""The dashboard: what is there and what runs, for this machine only, read-only, and nothing outside its directory."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

import pytest
from helpers.commands import ROOT, environment, rlcb
from helpers.forked import Command
from helpers.run_copies import copy_run, edit_json

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.tools.dashboard.run_processes import Processes


@pytest.fixture
def serve():
    started = []

    def start(directory):
        call = ["dashboard", directory, "--port", 0]
        process = Command(call, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
        started.append(process)
        return int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1])

    yield start
    for process in started:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        process.stdout.close()


def ask(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


def test_it_shows_runs_in_every_state(serve, cells, tmp_path):
    copy_run(cells["ppo_parallel"], tmp_path / "deep" / "good")
    copy_run(cells["a2c_sequential"], tmp_path / "failed", state="failed", reason="diverged")
    (copy_run(cells["a2c_parallel"], tmp_path / "broken") / "config.yaml").write_text("{")
    port = serve(tmp_path)
    _, content = ask(port, "/data")
    data = json.loads(content)
    runs = {run["name"]: run for run in data["runs"]}
    assert runs.keys() == {"deep/good", "failed", "broken"}
    assert (runs["deep/good"]["state"], runs["deep/good"]["fraction"]) == ("finished", 1.0)
    assert (runs["failed"]["state"], runs["failed"]["reason"]) == ("failed", "diverged")
    assert runs["broken"]["state"] == "unreadable"
    assert len(data["machine"]["cores"]) >= 1
    _, content = ask(port, "/series?run=deep%2Fgood")
    curves = json.loads(content)
    assert len(curves["speed"]["step"]) == len(curves["speed"]["y"]) > 5


def nasty(trained, folder):
    """Make runs as a crash, a bad disk or somebody with bad intentions may leave them."""

    def copied(name):
        run = shutil.copytree(trained, folder / name)
        edit_json(run / "training_summary.json", run_id=name)
        return run

    numbers = {
        "duration_hours": 1e306, "avg_fps": float("inf"), "final_reward": float("nan"), "total_timesteps": 10**400,
        "peak_memory_gb": -5, "total_updates": "many", "final_fps": None, "num_workers": 10**18,
        "phase_shares": {"env": 1e308}, "state": ["finished"], "usable_cores": -1,
    }  # fmt: skip
    for key, value in numbers.items():
        edit_json(copied(key) / "training_summary.json", **{key: value})
    (copied("deep") / "training_summary.json").write_text("[" * 100_000)
    edit_json(copied("text") / "training_summary.json", reason="\x00\x1b[2J\ud800" * 1000, cpu_model="\ud800")
    config = (trained / "config.yaml").read_text()
    for name, content in (
        ("config_deep", "[" * 50_000), ("config_null", "env: {name: 'a\0b'}"), ("config_binary", "\x00\x01"),
        ("config_tiny", config.replace("duration_hours: null", "duration_hours: 1.0e-320")),
        ("config_huge", config.replace("total_timesteps: 4000", f"total_timesteps: {10**400}")),
    ):  # fmt: skip
        (copied(name) / "config.yaml").write_text(content)
    with next(copied("log_numbers").rglob("metrics.jsonl")).open("a") as file:
        file.write(f'{{"step": {10**400}, "time": 1, "update": 9}}\n{{"step": 1e306, "time": 1e306, "update": 9}}\n')
        file.write('{"step": 9e9, "time": 9e9, "update": 9, "charts/SPS": 1e308, "charts/episodic_return": -1e308}\n')
        file.write('{"step": -1, "time": -1, "update": -1}\n\x00\x00\n' + "[" * 60_000 + "\n")
    for name in ("config.yaml", "logs/PPO_Sequential/metrics.jsonl", "eval.json", "training_summary.json", "clip.webp"):
        run = copied(f"pipe_{name.rpartition('/')[2]}")
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    for name, target in (("loop", "config.yaml"), ("device", "/dev/zero"), ("outside", "/etc/passwd")):
        run = copied(name)
        for file in ("config.yaml", "training_summary.json", "eval.json", "metrics.jsonl"):
            (run / file).unlink(missing_ok=True)
            (run / file).symlink_to(target)
    (copied("folder") / "training_summary.json").unlink()
    (folder / "folder" / "training_summary.json").mkdir()
    (folder / "dangling").symlink_to(folder / "dangling")
    copied("new\nline\x1b[2J")
    copied(os.fsdecode(b"surrogate\xff"))
    copied("closed").chmod(0)


def no_infinity(text):
    raise AssertionError(f"{text} is not JSON")


def test_one_damaged_run_does_not_stop_the_page(serve, trained, tmp_path):
    """Bug 15: whatever lies in the directory, every other run is shown, in JSON that a browser can read."""
    watched = tmp_path / "runs"
    shutil.copytree(trained, watched / "good")
    nasty(trained, watched)
    port = serve(watched)
    for _ in range(2):  # the second answer is of what was kept from the first
        answer, content = ask(port, "/data")
        assert answer.status == 200, content
        data = json.loads(content, parse_constant=no_infinity)
    runs = {run["name"]: run for run in data["runs"]}
    assert runs["good"]["state"] == runs["log_numbers"]["state"] == runs["pipe_eval.json"]["state"] == "finished"
    assert runs["new\\u000aline\\u001b[2J"]["state"] == "finished"
    assert all(name.isprintable() for name in runs)
    for name in ("duration_hours", "avg_fps", "total_timesteps", "total_updates", "deep", "config_deep", "config_huge",
                 "pipe_metrics.jsonl", "outside", "folder"):  # fmt: skip
        assert runs[name]["state"] == "unreadable", name
        assert runs[name]["reason"], name
    for name in runs:
        answer, content = ask(port, f"/series?run={urllib.parse.quote(name)}")
        assert answer.status in (200, 404), name
        if answer.status == 200:
            json.loads(content, parse_constant=no_infinity)
    assert ask(port, "/series?run=good")[0].status == 200
    for call in (["runs", watched], ["compare", watched], ["report", watched, "--output-dir", tmp_path / "out"]):
        assert main.main([*map(str, call)]) == 0


def test_it_answers_this_machine_only_and_reads_only(serve, cells, tmp_path):
    copy_run(cells["ppo_parallel"], tmp_path / "run")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    port = serve(tmp_path)
    for host in ("localhost", "127.0.0.1", f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
        assert ask(port, "/data", Host=host)[0].status == 200, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1:1", "", "[::2]"):
        answer, content = ask(port, "/data", Host=host)
        assert answer.status == 403, host
        assert b"runs" not in content
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(port, "/data", method)[0].status == 501
    answer, _ = ask(port, "/")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    for address in others:
        with socket.socket() as outside:
            outside.settimeout(5)
            assert address.startswith("127.") or outside.connect_ex((address, port)) != 0


def test_no_file_outside_its_directory_is_shown(serve, cells, tmp_path):
    copy_run(cells["ppo_parallel"], tmp_path / "outside")
    inside = tmp_path / "inside"
    copy_run(cells["ppo_sequential"], inside / "run")
    (inside / "link").symlink_to(tmp_path / "outside")
    port = serve(inside)
    assert [run["name"] for run in json.loads(ask(port, "/data")[1])["runs"]] == ["run"]
    for name in ("../outside", "link", str(tmp_path / "outside"), "run/../../outside", "", "%00", "..%2Foutside"):
        assert ask(port, f"/series?run={name}")[0].status in (400, 404), name
    for path in ("/run/config.yaml", "/../outside/config.yaml", "/etc/passwd", "//etc/passwd", "/%2e%2e/outside"):
        assert ask(port, path)[0].status == 404, path


def test_a_run_that_goes_on_with_its_workers(serve, browser, cells, tmp_path):
    """In a real browser: the live run appears with its processes, and its curve grows without a reload."""
    call = ["train", "--mode", "parallel", "--env", "Catch-v0", "--num-workers", "2", "--num-envs", "16"]
    call += ["--batch-size", "128", "--set", "training.n_steps=32", "--set", "parallel.pin=never", "--num-threads", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "rl_cluster_benchmark", *call, "--total-timesteps", "100000000",
         "--output-dir", tmp_path / "live"],
        cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = serve(tmp_path)
        end = time.monotonic() + 60
        runs = []
        while time.monotonic() < end and not (runs and runs[0].get("steps", 0) > 0):
            runs = json.loads(ask(port, "/data")[1])["runs"]
            time.sleep(0.2)
        (run,) = runs
        assert run["state"] == "running"
        assert [p["role"] for p in run["processes"]] == ["parent", "worker", "worker"]
        assert run["processes"][0]["pid"] == process.pid
        assert abs(sum(run["phases"].values()) - 1) < 0.01
        browser.size(1000, 800)
        browser.open(f"http://127.0.0.1:{port}/")
        row = "document.querySelector('#runs tr')?.innerText || ''"
        length = "document.querySelector('.chart[data-panel=speed] path')?.getAttribute('d').length || 0"
        steps = "document.querySelector('#runs tr td.figure')?.innerText || ''"
        seen = set()
        while time.monotonic() < end and (len(seen) < 2 or not browser.evaluate(length)):
            seen.add(browser.evaluate(steps))
            time.sleep(0.5)
        assert len(seen - {""}) >= 1
        assert "running" in browser.evaluate(row)
        assert browser.evaluate(length) > 10
        browser.click('button[data-run="live"]')
        assert browser.evaluate(length) == 0
        assert browser.errors == []
        assert all(url.startswith((f"http://127.0.0.1:{port}/", "data:")) for url in browser.requests)
    finally:
        process.kill()
        process.wait()


BUSY = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True)\nwhile 1: pass"


def test_two_pages_that_ask_at_once_see_the_same_cpu_use(tmp_path):
    """The kernel counts CPU time in hundredths of a second: over a shorter time there is nothing to see."""
    with subprocess.Popen([sys.executable, "-c", BUSY, tmp_path / ".lock"], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            processes = Processes()
            processes.of_run(tmp_path)
            time.sleep(2)
            shown = [(processes.of_run(tmp_path)[0]["cpu"], processes.cores()) for _ in range(5)]
        finally:
            process.kill()
    assert shown[0][0] > 1
    assert shown == shown[:1] * 5


def test_wrong_arguments():
    for args, text in (
        (("nowhere",), "is not a directory"),
        ((".", "--port", "99999999"), "argument --port: 99999999 is not allowed"),
    ):
        done = rlcb("dashboard", *args)
        assert done.returncode == 2
        assert text in done.stderr
        assert "Traceback" not in done.stderr
