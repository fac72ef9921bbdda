"""The dashboard: what is there and what runs, for this machine only, read-only, and nothing outside its directory."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT, environment
from run_copies import copy_run
from test_report import browser  # noqa: F401 a fixture


@pytest.fixture
def serve():
    started = []

    def start(directory):
        process = subprocess.Popen(
            [sys.executable, "-m", "rl_cluster_benchmark", "dashboard", directory, "--port", "0"],
            cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
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


def test_a_run_that_goes_on_with_its_workers(serve, browser, cells, tmp_path):  # noqa: F811
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


def test_wrong_arguments():
    for args, text in ((("nowhere",), "is not a directory"), ((".", "--port", "99999999"), "Port 99999999 cannot")):
        done = subprocess.run(
            [sys.executable, "-m", "rl_cluster_benchmark", "dashboard", *args],
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert text in done.stderr
        assert "Traceback" not in done.stderr
