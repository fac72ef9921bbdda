"""bench/peers: what is measured, what is compared, and that one library's failure is not the others'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "bench" / "peers"
sys.path.append(str(FOLDER))

import environments  # noqa: E402
import measure  # noqa: E402
import network  # noqa: E402
import results  # noqa: E402
import run  # noqa: E402
import score  # noqa: E402
import train_ours  # noqa: E402
from job import JOBS  # noqa: E402
from rl_cluster_benchmark.config import config_files  # noqa: E402
from rl_cluster_benchmark.config.schema import HardwareConfig, ModelConfig  # noqa: E402
from rl_cluster_benchmark.nets.models import make_model  # noqa: E402
from rl_cluster_benchmark.run import checkpoint  # noqa: E402

JOB = JOBS["a2c"]

LEARNS = """
    import torch
    from job import arguments
    from network import ActorCritic

    args = arguments()
    model = ActorCritic(15)
    optimizer = torch.optim.Adam(model.parameters())
    args.report.count(model.trunk, model)
    args.report.facts(levels="coinrun easy, 200 from 0", num_envs=64, reward="normalised", precision="float32",
                      setting="a test", versions={"torch": torch.__version__})
    for update in range(1, 10**6):
        images = torch.zeros(8, 64, 64, 3)
        with torch.no_grad():
            model(images)
        model(images)[1].sum().backward()
        optimizer.step()
        args.report.update(4 * update)
"""
LEAVES_A_CHILD = """
    import subprocess, sys, time
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(child.pid, file=open({place!r}, "w"), flush=True)
    time.sleep(1)
    sys.exit("the library is broken")
"""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "WARM_UP", 0.2)
    monkeypatch.setattr(measure, "SECONDS_BETWEEN_FIGURES", 0.0)


def peer(folder: Path, name: str, text: str, algorithms: tuple[str, ...] = ("a2c",)) -> run.Peer:
    script = folder / f"{name}.py"
    script.write_text(textwrap.dedent(text))
    return run.Peer(f"The {name}", str(script), algorithms)


def read(folder: Path) -> list[dict[str, Any]]:
    reports: list[dict[str, Any]] = json.loads((folder / "peers.json").read_text())
    return reports


@pytest.mark.usefixtures("short")
def test_a_failing_library_is_reported_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "pid")
    peers = {
        "broken": peer(tmp_path, "broken", LEAVES_A_CHILD.format(place=place)),
        "ours": peer(tmp_path, "learner", LEARNS),
        "elsewhere": run.Peer("The elsewhere", "", ("a2c",), missing="it is sold in shops only"),
    }
    options = ["--installed", "--algorithm", "a2c", "--seconds", "0.3", "--output-dir", str(tmp_path / "out")]
    assert run.main(options, peers) == 0

    report = read(tmp_path / "out")[0]
    broken, learner = report["runs"]
    assert broken["failed"] == "ended with status 1: the library is broken"
    assert not psutil.pid_exists(int(Path(place).read_text()))
    assert learner["seconds"] >= 0.3
    assert learner["fps"] > 0
    assert learner["memory"] > 50e6
    assert 0 < learner["busy_cores"] <= (os.cpu_count() or 1) + 0.5
    # Counted, not told: 8 samples and one step of the optimiser for 4 environment steps, those without gradient not.
    assert learner["facts"]["parameters"] == 626_256
    assert learner["facts"]["samples_per_step"] == pytest.approx(2)
    assert learner["facts"]["optimizer_steps_per_step"] == pytest.approx(1 / 4)

    text = (tmp_path / "out" / "peers.md").read_text()
    assert text in capsys.readouterr().out + "\n"
    assert "- The broken: not measured: ended with status 1: the library is broken" in text
    assert "- The elsewhere: not measured: it is sold in shops only" in text
    assert (tmp_path / "out" / "peers.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("short")
def test_our_own_row_does_the_job(tmp_path: Path) -> None:
    """Also when it is ended in the middle of an update, as PPO's are most of the time."""
    options = [
        "--only",
        "ours",
        "--algorithm",
        "ppo",
        "--n-steps",
        "4",
        "--seconds",
        "1",
        "--output-dir",
        str(tmp_path),
    ]
    assert run.main(options) == 0
    (row,) = results.rows(read(tmp_path)[0])
    assert row["ours_over_it"] == 1
    assert set(row["differs"]) <= {"precision"}  # bfloat16 where the machine has it
    assert row["facts"]["samples_per_step"] == pytest.approx(3, rel=0.05)


def test_a_step_of_impala_has_whole_unrolls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are those of the unrolls that all learners take, whatever batch_size asks for."""
    changes = {"algorithm": "impala", "mode": "parallel", "env.num_envs": 12, "impala.num_learners": 3,
               "training.n_steps": 20, "training.batch_size": 128}  # fmt: skip
    config = config_files.load(None, changes)
    state = {"config": config_files.to_dict(config), "progress": {"steps": 1200}, "model": {},
             "algorithm": {"optimizer": {"steps": 10}}}  # fmt: skip
    summary = {"num_workers": 4, "num_learners": 3, "precision": "float32", "engine": "torch", "versions": {}}
    (tmp_path / "training_summary.json").write_text(json.dumps(summary))
    monkeypatch.setattr(checkpoint, "load", lambda path: state)
    told: dict[str, Any] = {}
    train_ours.tell(tmp_path, tmp_path / "final.pt", SimpleNamespace(facts=told.update))  # type: ignore[arg-type]
    assert told["samples_per_step"] == pytest.approx(10 * 6 * 20 / 1200), "two unrolls of twenty steps for each learner"


def facts(**changes: Any) -> dict[str, Any]:
    return results.expected(JOB) | {"setting": "as told", "versions": {"torch": "2.13.0"}} | changes


def recorded(*runs: dict[str, Any]) -> dict[str, Any]:
    names = dict.fromkeys(run["peer"] for run in runs)
    return {
        "job": vars(JOB), "date": "2026-01-02", "machine": {"cpu": "A fine CPU", "cores": 2}, "seconds": 60.0,
        "rounds": 2, "titles": {name: name.upper() for name in names}, "left_out": {}, "runs": list(runs),
    }  # fmt: skip


def measured(name: str, number: int, fps: float, *, others_busy: float = 0.0, **changes: Any) -> dict[str, Any]:
    outcome = measure.Measurement(fps, 10, 60.0, 2_500_000_000, 1.9, others_busy, facts(**changes))
    return results.record(name, number, outcome)


def test_the_table_compares_runs_of_the_same_round() -> None:
    report = recorded(
        measured("ours", 1, 500.0), measured("sb3", 1, 100.0), measured("ours", 2, 1000.0), measured("sb3", 2, 250.0)
    )  # fmt: skip
    ours, sb3 = results.rows(report)
    assert (ours["peer"], ours["fps"], ours["differs"]) == ("ours", 750.0, [])
    assert sb3["ours_over_it"] == 4.5  # of 5 and 4; the medians would give 4.3
    text = results.markdown(report)
    row = next(line for line in text.splitlines() if line.startswith("| SB3 "))
    assert [cell.strip() for cell in row.split("|")[2:7]] == ["175", "100, 250", "4.50", "2.5", "1.90"]
    assert "A fine CPU, 2 cores, 2026-01-02" in text
    assert "≠" not in text.replace("≠ marks", "")
    assert results.draw([report, report]).startswith(b"\x89PNG")


def test_a_library_that_was_not_alone_is_named() -> None:
    runs = [measured("ours", 1, 500.0), measured("ours", 2, 400.0, others_busy=0.7), measured("sb3", 1, 100.0)]
    text = results.markdown(recorded(*runs))
    assert "- OURS: not alone: other processes kept 0.70 cores busy" in text
    assert "SB3: not alone" not in text


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("parameters", 600_000, "≠ 600,000"),
        ("samples_per_step", 2.0, "≠ 2.00"),
        ("optimizer_steps_per_step", 1 / 640, "≠ 1.56"),
        ("levels", "coinrun easy, 0 from 0", "≠ coinrun easy, 0 from 0"),
        ("reward", "raw", "≠ raw"),
        ("precision", "bfloat16", "≠ bfloat16"),
        ("num_envs", 32, "≠ 32"),
    ],
)
def test_other_work_than_the_jobs_is_marked(key: str, value: object, shown: str) -> None:
    report = recorded(measured("ours", 1, 500.0), measured("sb3", 1, 100.0, **{key: value}))
    ours, sb3 = results.rows(report)
    assert (ours["differs"], sb3["differs"]) == ([], [key])
    line = next(line for line in results.markdown(report).splitlines() if shown in line)
    assert line.startswith("| SB3 ")


def test_a_library_that_cannot_be_installed_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(measure.PeerFailedError, match=r"cannot be installed: ERROR: No matching distribution .* torch"):
        environments.python_of("sb3", tmp_path)


def test_the_peers_network_is_ours(tmp_path: Path) -> None:
    """The same weights give the same logits, also when they went through a file to be scored."""
    ours = make_model(
        ModelConfig(), (64, 64, 3), 15, HardwareConfig(), torch.float32
    )  # fmt: skip
    theirs = network.ActorCritic(15)
    weights = [parameter.detach().contiguous() for parameter in ours.parameters()]
    hidden = next(i for i, weight in enumerate(weights) if weight.shape == (256, 2048))
    weights[hidden] = weights[hidden].reshape(256, 8, 8, 32).permute(0, 3, 1, 2).reshape(256, 2048)
    torch.nn.utils.vector_to_parameters(torch.cat([weight.flatten() for weight in weights]), theirs.parameters())
    network.save(str(tmp_path / "network.pt"), theirs.trunk, theirs.policy)

    images = torch.randint(0, 256, (3, 64, 64, 3), dtype=torch.uint8)
    expected = ours(images)[0].detach().numpy()
    assert score.policy_of(tmp_path / "network.pt")(images.numpy()) == pytest.approx(expected, abs=1e-5)


def test_mistakes_are_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER), "--only", "ours,sb4"], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert "'sb4' is not one of ours, ours_float32, sb3" in done.stderr
    assert "Traceback" not in done.stderr
