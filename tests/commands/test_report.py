"""The report: complete, self-contained, safe with strangers' runs, and alive in a real browser."""

import json
import re

import numpy as np
import pytest
from helpers.commands import rlcb
from helpers.run_copies import copy_run, evaluate_as
from PIL import Image

from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.runs import load_run
from rl_cluster_benchmark.tools.evaluation.video import FrameRecorder, clip_mark
from rl_cluster_benchmark.tools.reports.report import html, markdown

COINRUN, MAZE = "procgen-coinrun-v0", "procgen-maze-v0"
ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"`"


@pytest.fixture(scope="module")
def report(cells, tmp_path_factory):
    """A report about PPO and A2C on two games, two seeds each, with evaluations and a clip; the page's path."""
    folder = tmp_path_factory.mktemp("report")
    for name in ("ppo_sequential", "ppo_parallel", "a2c_sequential"):
        for env in (COINRUN, MAZE):
            for seed in (1, 2):
                changes = {"env.name": env, "env.seed": seed}
                run = copy_run(cells[name], folder / "runs" / f"{name}_{env}_{seed}", config=changes)
                evaluate_as(run, env, train=6.0 + seed / 10, test=5.0 + seed / 10)
    recorder = FrameRecorder(folder / "runs" / f"ppo_parallel_{COINRUN}_2" / "clip.webp")
    for _ in range(5):
        recorder(np.random.default_rng(0).integers(0, 255, (9, 64, 64, 3), dtype=np.uint8))
    recorder.close(clip_mark(load_run(recorder.path.parent).summary.checkpoint.digest, "trained"))
    done = rlcb("report", folder / "runs", "--output-dir", folder / "out", "--title", "Two games")
    assert done.returncode == 0, done.stderr
    return folder / "out" / "report.html"


def test_it_holds_every_section_and_every_run(report):
    page = report.read_text()
    for text in (
        "<h1>Two games</h1>", "Results", "Curves", "Normalised scores", "Interquartile mean", "Evaluation",
        "Probability of improvement", "Performance profile", "generalisation gap", "Where the time goes",
        "Speed and scaling", "The agents at play", "Every run, and how to repeat it", "data:image/webp;base64,",
    ):  # fmt: skip
        assert text in page, text
    assert page.count("<details>") == 12
    assert page.count("rlcb train --config ") == 12
    assert page.count("n_steps:") == 12
    assert page.count("n_epochs:") == 8, "A2C does not use it"
    assert "one seed" not in page


def test_it_needs_no_network(report):
    """No address in it but the names of SVG and of the policy; the policy forbids everything from outside."""
    page = report.read_text()
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|iframe|object|embed)\b", page)


def test_markdown_has_the_same_figures(report):
    text = report.with_name("report.md").read_text()
    for part in ("# Two games", "![curves](comparison.png)", "### coinrun (easy, 200 levels)", "| PPO parallel |"):
        assert part in text, part
    assert text.count("rlcb train --config ") == 12
    assert report.with_name("comparison.png").read_bytes()[:4] == b"\x89PNG"
    assert len(json.loads(report.with_name("comparison.json").read_text())["groups"]) == 6


def test_a_strangers_run_cannot_put_markup_into_the_page(cells, tmp_path):
    attack = ATTACK.replace("/", "")  # in a directory's name
    run = copy_run(
        cells["ppo_sequential"], tmp_path / f"run{attack}", cpu_model=ATTACK, git_commit=ATTACK,
        versions={ATTACK: ATTACK}, phase_shares={ATTACK: 1.0}, finished_at=ATTACK, precision=ATTACK,
    )  # fmt: skip
    stopped = copy_run(cells["ppo_parallel"], tmp_path / "b", state="failed", reason=ATTACK)
    (tmp_path / f"empty{attack}").mkdir()
    comparison = Comparison.load([run, stopped, tmp_path / f"empty{attack}"], unfinished=True)
    page = html(comparison, title=ATTACK)
    assert "alert(1)" in page  # it is shown
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert page.count("<script") == 3
    text = markdown(comparison, title=ATTACK)
    assert not re.search(r"^(?! {4}).*<(script|img)", text, flags=re.MULTILINE)  # but in blocks of code


def test_a_clip_that_is_no_picture_stays_out(cells, tmp_path):
    run = copy_run(cells["ppo_sequential"], tmp_path / "run")
    (run / "clip.webp").write_text("<svg onload=alert(1)>")
    (run / "clip.gif").symlink_to("/etc/hostname")
    assert "data:" not in html(Comparison.load([run]), "x").replace("img-src data:", "")


def test_clips_are_short_and_small(tmp_path):
    recorder = FrameRecorder(tmp_path / "clip.webp")
    frames = np.random.default_rng(0).integers(0, 255, (9, 64, 64, 3), dtype=np.uint8)
    for shift in range(130):
        recorder(np.roll(frames, shift, axis=2))
    recorder.close()
    with Image.open(tmp_path / "clip.webp") as clip:
        assert clip.size == (128, 128)
        assert clip.n_frames <= 100


def lines(browser, panel="reward", task=0):
    """The names of the lines that a chart shows."""
    place = f'.chart[data-task="{task}"][data-panel="{panel}"]'
    return browser.evaluate(f"[...document.querySelectorAll('{place} [data-series]')].map(e => e.dataset.series)")


def test_in_chromium_it_opens_from_disk_and_its_toggles_work(report, browser, tmp_path):
    browser.size(1200, 900)
    browser.open(report.as_uri())
    everyone = ["A2C sequential", "PPO parallel", "PPO sequential"]
    assert sorted(lines(browser)) == everyone
    assert sorted(lines(browser, "progress")) == everyone
    profile = "[...document.querySelectorAll('#profile [data-series]')].length"
    assert browser.evaluate(profile) == 3
    browser.click('button[data-variant="PPO parallel"]')
    assert sorted(lines(browser)) == ["A2C sequential", "PPO sequential"]
    assert browser.evaluate(profile) == 2
    assert browser.evaluate("document.querySelector('[data-variant=\"PPO parallel\"]').ariaPressed") == "false"
    browser.click('button[data-variant="PPO parallel"]')
    assert sorted(lines(browser)) == everyone
    label = "document.querySelector('.chart[data-panel=reward] svg').textContent"
    assert "environment steps" in browser.evaluate(label)
    browser.click('button[data-axis="time"]')
    assert "minutes" in browser.evaluate(label)
    browser.hover('.chart[data-panel="speed"] svg')
    tip = browser.evaluate("document.querySelector('.chart[data-panel=speed] .tip').innerText")
    assert "PPO parallel: " in tip
    shown = "[...document.querySelectorAll('.task')].map(e => !e.hidden)"
    assert browser.evaluate(shown) == [True, False]
    browser.evaluate("(() => { const s = document.getElementById('task'); s.value = '1'; "
                     "s.dispatchEvent(new Event('change')); })()")  # fmt: skip
    assert browser.evaluate(shown) == [False, True]
    assert sorted(lines(browser, task=1)) == everyone
    assert browser.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert browser.errors == []
    assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data"}


def test_in_chromium_it_fits_a_phone_the_dark_and_paper(report, browser, tmp_path):
    browser.size(360, 740, phone=True)
    browser.open(report.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360
    light = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.dark()
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != light
    browser.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes()[:5] == b"%PDF-"
    assert browser.errors == []
