"""Results say what they are of: of another agent, another task or another state of the run they are left out."""

import json
import os
import shutil
import subprocess
import time

import pytest
import yaml
from helpers.commands import ROOT, TINY, environment, rlcb
from helpers.forked import Command
from helpers.run_copies import edit_json

from rl_cluster_benchmark.cli import main
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.env import published
from rl_cluster_benchmark.run import checkpoint, provenance
from rl_cluster_benchmark.tools.analysis import evaluations
from rl_cluster_benchmark.tools.analysis.comparison import Comparison
from rl_cluster_benchmark.tools.analysis.runs import load_run, load_runs
from rl_cluster_benchmark.tools.analysis.verdicts import headline
from rl_cluster_benchmark.tools.evaluation.video import clip_mark
from rl_cluster_benchmark.tools.reports import plots, tables
from rl_cluster_benchmark.tools.reports.report import html, markdown
from rl_cluster_benchmark.tools.reports.template import as_template

FINAL = "checkpoints/ppo_sequential_final.pt"


def evaluate(run, json_name, *args, file=FINAL, episodes=10):
    """What `rlcb evaluate` does, without starting Python again."""
    call = ["evaluate", "--checkpoint", run / file, "--num-episodes", episodes, "--num-threads", 1]
    return main.main([*map(str, call), "--json", str(run / json_name), *map(str, args)])


def of_run(run, name, **changes):
    """An evaluation as the run's own would be, with some figures changed."""
    summary = json.loads((run / "training_summary.json").read_text())
    content = {
        "mean_reward": 5.0, "std_reward": 1.0, "min_reward": 0.0, "max_reward": 10.0, "mean_length": 9.0,
        "std_length": 0.0, "num_episodes": 100, "ci95": [4.0, 6.0], "levels": "all", "env": summary["env"],
    } | changes  # fmt: skip
    content["origin"] = {
        "policy": "trained", "checkpoint": summary.get("checkpoint"), "run_id": summary.get("run_id"),
        "env": yaml.safe_load((run / "config.yaml").read_text())["env"],
    }  # fmt: skip
    (run / name).write_text(json.dumps(content))


def as_coinrun(source, target, seed, **levels):
    """A copy that passes for another seed's run on CoinRun, evaluated: `test=5.0`."""
    shutil.copytree(source, target)
    config = yaml.safe_load((target / "config.yaml").read_text())
    config["env"] |= {"name": "procgen-coinrun-v0", "seed": seed}
    (target / "config.yaml").write_text(yaml.safe_dump(config))
    edit_json(target / "training_summary.json", env="procgen-coinrun-v0", seed=seed, run_id=f"{target.name}")
    for name, reward in levels.items():
        of_run(target, f"eval_{name}.json", levels=name, mean_reward=reward, ci95=[reward - 1, reward + 1])
    return target


def test_only_evaluations_of_the_runs_own_agent_count(trained, tmp_path, capsys):
    """Bug 4: a random policy's, an earlier checkpoint's and another task's do not stand for the agent's."""
    run = shutil.copytree(trained, tmp_path / "run")
    earlier = next(file for file in (run / "checkpoints").glob("*_step_*.pt"))
    assert evaluate(run, "eval_own.json") == 0
    assert evaluate(run, "eval_random.json", "--random", episodes=11) == 0
    assert evaluate(run, "eval_earlier.json", file=f"checkpoints/{earlier.name}", episodes=12) == 0
    assert evaluate(run, "eval_task.json", "--set", "env.num_levels=50", episodes=13) == 0
    (run / "eval_cut.json").write_text((run / "eval_own.json").read_text()[:100])
    os.mkfifo(run / "eval_pipe.json")
    loaded = load_run(run)
    assert loaded.evaluations["all"].num_episodes == 10

    reasons = {item.path.name: item.reason for item in loaded.left_out}
    steps = int(earlier.stem.rpartition("_")[2])
    for name, text in {
        "eval_random.json": "of a random policy",
        "eval_earlier.json": f"of another checkpoint (at {steps:,} steps",
        "eval_task.json": "env.num_levels = 50, the run has 200",
        "eval_cut.json": "is damaged",
        "eval_pipe.json": "no plain file",
    }.items():
        assert text in reasons.pop(name), name
    assert not reasons
    comparison = Comparison.load([run])
    capsys.readouterr()
    assert main.main(["runs", str(tmp_path)]) == 0
    for shown in (tables.as_table(comparison), tables.as_json(comparison), html(comparison, "x"),
                  markdown(comparison, "x").replace("\\", ""), capsys.readouterr().out):  # fmt: skip
        assert "of a random policy" in shown
        assert "of another checkpoint" in shown

    origin = json.loads((run / "eval_own.json").read_text())["origin"]
    final = origin["checkpoint"]
    assert final["digest"] == checkpoint.digest_of(run / FINAL) == loaded.summary.checkpoint.digest
    assert (final["steps"], origin["policy"]) == (loaded.summary.total_timesteps, "trained")
    assert origin["env"]["num_levels"] == 200
    assert origin["versions"]["torch"]
    shutil.rmtree(run / "checkpoints")  # results are kept without checkpoints: the summary names the last
    assert load_run(run).evaluations["all"].num_episodes == 10
    assert main.main(["evaluate", "--checkpoint", str(trained / FINAL), "--json", str(run / "metrics.json")]) == 2
    assert "is part of a run's own record" in capsys.readouterr().err


@pytest.mark.timeout(600)
def test_the_evaluations_of_an_earlier_state_do_not_pass_for_those_of_a_later_one(trained, tmp_path):
    """Bug 4: after --resume the old evaluation is named as such; after --overwrite it is gone, like the clip."""
    run = shutil.copytree(trained, tmp_path / "run")
    before = load_run(run).summary
    assert evaluate(run, "evaluation_all.json") == 0
    assert "all" in load_run(run).evaluations
    call = ("train", *TINY, "--output-dir", run)
    done = rlcb(*call, "--resume", "--total-timesteps", 6000)
    assert done.returncode == 0, done.stderr
    resumed = load_run(run)
    assert resumed.evaluations == {}
    assert f"at {before.total_timesteps:,.0f} steps; the run's last is at" in resumed.left_out[0].reason
    assert resumed.summary.run_id == before.run_id
    assert (len(resumed.summary.parts), resumed.doubts) == (1, ())
    (run / "clip.webp").write_bytes(b"RIFF, the old agent")
    of_run(run, "eval_mine.json")
    (run / "evaluate_notes.json").write_text('{"by": "somebody"}')
    done = rlcb(*call, "--overwrite", "--total-timesteps", 1000, "--algorithm", "a2c")
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in run.iterdir() if not file.name.startswith(".")) == [
        "benchmark_metrics.json", "checkpoints", "config.yaml", "evaluate_notes.json", "logs", "metrics.json",
        "training_summary.json",
    ]  # fmt: skip
    assert not list((run / "checkpoints").glob("ppo_*"))  # nor anything else of the run that was replaced
    assert [log.parent.name for log in run.glob("logs/*/metrics.jsonl")] == ["A2C_Sequential"]
    assert load_run(run).summary.run_id != before.run_id


def kill_after_a_new_checkpoint(run, *args):
    """Resume the run, and kill it as soon as it has saved again; returns (its newest checkpoint, the one before)."""
    before = set((run / "checkpoints").glob("*.pt"))
    call = ["train", "--resume", "--output-dir", run, *args]
    process = Command(call, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while not set((run / "checkpoints").glob("*.pt")) - before and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    files = (run / "checkpoints").glob("*_step_*.pt")
    return sorted(files, key=lambda file: -int(file.stem.rpartition("_")[2]))[:2]


def test_a_run_that_failed_and_was_killed_after_a_resume_is_what_its_files_are(trained, tmp_path, call):
    """Its old summary tells of updates that are gone; an evaluation of its newest checkpoint counts, no other one."""
    run = shutil.copytree(trained, tmp_path / "run")
    (run / FINAL).unlink()
    failed = {"state": "failed", "reason": "Worker 1 was killed", "total_updates": 100_000}
    for name in ("training_summary.json", "benchmark_metrics.json"):
        edit_json(run / name, **failed, total_timesteps=51_200_000, checkpoint=None)
    more = ("--total-timesteps", 100_000_000, "--set", "training.save_interval=1")
    newest, earlier = kill_after_a_new_checkpoint(run, *more)
    assert evaluate(run, "evaluation_all.json", file=newest.relative_to(run)) == 0
    assert evaluate(run, "eval_earlier.json", file=earlier.relative_to(run), episodes=20) == 0
    evaluation = json.loads((run / "evaluation_all.json").read_text())
    (run / "eval_old.json").write_text(json.dumps(evaluation | {"num_episodes": 99, "origin": None}))

    listed = json.loads(call("runs", run, "--format", "json")[1])["runs"][0]
    steps, at = (int(file.stem.rpartition("_")[2]) for file in (newest, earlier))
    assert (listed["state"], "killed" in listed["reason"]) == ("interrupted", True)
    assert steps <= listed["steps"] < 1_000_000
    assert listed["notes"] == [
        f"eval_earlier.json: is of another checkpoint (at {at:,} steps; the run's last is at {steps:,}); evaluate "
        "again",
        "eval_old.json: does not say which checkpoint it is of; evaluate again",
    ]
    (group,) = json.loads(call("compare", "--unfinished", run, "--format", "json")[1])["groups"]
    assert group["all_levels_reward"]["mean"] == evaluation["mean_reward"]


def test_evaluations_of_older_versions_are_taken_on_trust_and_marked(trained, tmp_path):
    """Neither run nor evaluation says what it is of: they are shown, with a word; one that should say is left out."""
    run = shutil.copytree(trained, tmp_path / "run")
    of_run(run, "eval_all.json")
    edit_json(run / "eval_all.json", origin=None)
    assert load_run(run).evaluations == {}
    assert "does not say which checkpoint" in load_run(run).left_out[0].reason
    edit_json(run / "training_summary.json", run_id=None, checkpoint=None)
    comparison = Comparison.load([run])
    assert comparison.runs[0].evaluations["all"].mean_reward == 5.0
    assert any("do not say which checkpoint they are of" in note for note in comparison.warnings())


def as_older(run, **changes):
    """Make a copy one of a version whose summaries name neither run nor checkpoint."""
    edit_json(run / "training_summary.json", run_id=None, checkpoint=None, **changes)
    return json.loads((run / "training_summary.json").read_text())


def test_older_runs_are_read_whatever_did_nothing_in_their_config(trained, tmp_path, call):
    """A config that said use_sequential_levels: true had no effect: the run is listed, plotted and resumed."""
    run = shutil.copytree(trained, tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("use_sequential_levels: false", "use_sequential_levels: true"))
    assert load_run(run).config.env.use_sequential_levels is False
    assert plots._env_of(run / "logs" / "PPO_Sequential" / "metrics.jsonl") is not None
    status, out, err = call("train", "--resume", "--output-dir", run)
    assert (status, "Nothing is left to do" in out) == (0, True), err
    refused = call("train", "--resume", "--output-dir", run, "--set", "env.use_sequential_levels=true")
    assert "use_sequential_levels = true does nothing" in refused[2]


def test_evaluations_of_an_older_run_whose_checkpoints_are_elsewhere_count_by_their_steps(trained, tmp_path):
    """Without --output-dir the checkpoints are not beside the run: nothing there can be compared but the steps."""
    run = shutil.copytree(trained, tmp_path / "run")
    of_run(run, "eval_all.json")
    of_run(run, "eval_early.json", num_episodes=101)
    steps = as_older(run)["total_timesteps"]
    origin = json.loads((run / "eval_all.json").read_text())["origin"]
    digest = origin["checkpoint"]["digest"]
    edit_json(run / "eval_all.json", origin=origin | {"run_id": None})
    early = origin | {"run_id": None, "checkpoint": {"digest": digest, "steps": steps - 512}}
    edit_json(run / "eval_early.json", origin=early)
    (run / "clip.webp").write_bytes(b"RIFF" + clip_mark(digest, "trained"))
    shutil.rmtree(run / "checkpoints")
    loaded = load_run(run)
    assert loaded.evaluations["all"].num_episodes == 100
    reasons = [item.reason for item in loaded.left_out]
    assert len(reasons) == 2
    assert all("its checkpoints are not in its directory" in reason for reason in reasons)


def test_the_last_checkpoint_of_an_older_run_that_was_interrupted_is_no_final_one(trained, tmp_path):
    """A final one beside it is of an end before that: the run was resumed with more steps, and stopped by a signal."""
    run = shutil.copytree(trained, tmp_path / "run")
    later = run / "checkpoints" / "ppo_sequential_step_9000.pt"
    digest = checkpoint.save(later, {"steps": 9000})
    final = checkpoint.digest_of(run / FINAL)
    for state, expected in (("interrupted", digest), ("finished", final)):
        as_older(run, state=state, total_timesteps=9000)
        loaded = load_run(run)
        assert evaluations.last_checkpoint(run, loaded.config, loaded.summary).digest == expected


@pytest.mark.parametrize("keeps_steps", [True, False])
def test_of_a_finished_run_that_goes_on_the_final_checkpoint_is_the_last_until_another_one_is_saved(
    trained, tmp_path, keeps_steps
):
    """It has more steps than those that were saved on the way to it: evaluations of these are of another agent."""
    run = shutil.copytree(trained, tmp_path / "run")
    (log,) = run.glob("logs/*/metrics.jsonl")
    line = json.loads(log.read_text().splitlines()[-1])
    steps = load_run(run).summary.total_timesteps
    earlier = sorted((run / "checkpoints").glob("*_step_*.pt"))
    assert evaluate(run, "eval_final.json") == 0
    assert evaluate(run, "eval_earlier.json", file=earlier[0].relative_to(run), episodes=20) == 0
    for file in earlier if not keeps_steps else ():
        file.unlink()
    further = {key: line[key] + 1 for key in ("step", "update", "time")}  # it was resumed, and killed before it saved
    log.write_text(f"{log.read_text()}{json.dumps(line | further)}\n")
    loaded = load_run(run)
    assert (loaded.state, loaded.evaluations["all"].num_episodes) == ("interrupted", 10)
    (left_out,) = loaded.left_out
    assert left_out.path.name == "eval_earlier.json"
    assert f"the run's last is at {steps:,.0f})" in left_out.reason


def test_a_right_clip_counts_beside_a_wrong_one(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    right = b"GIF89a" + clip_mark(checkpoint.digest_of(run / FINAL), "trained")
    loaded = load_run(run)

    def clip():
        return evaluations.load_clip(run, loaded.config, loaded.summary)

    for wrong, reason in (
        (b"RIFF", "clip.webp does not say which checkpoint it shows"),
        (b"RIFF" + clip_mark("0" * 64, "trained"), "clip.webp does not show the run's last checkpoint"),
        (b"RIFF" * 1_000_000, "clip.webp is larger than 3,000,000 bytes: too large for a page"),
    ):
        (run / "clip.webp").write_bytes(wrong)
        (run / "clip.gif").unlink(missing_ok=True)
        with pytest.raises(UserError, match=reason):
            clip()
        (run / "clip.gif").write_bytes(right)
        assert clip() == ("image/gif", right)


def test_all_levels_are_not_called_unseen_and_not_ranked_with_them(trained, tmp_path):
    """Bug 17: `all` holds the training levels; it is called what it is, and compared with its like alone."""
    one = as_coinrun(trained, tmp_path / "one", 1, train=6.0, all=5.0)
    two = as_coinrun(trained, tmp_path / "two", 2, train=6.5, all=5.5)
    comparison = Comparison.load([one, two])
    assert comparison.basis[0] == "all"
    shown = [
        tables.as_table(comparison), markdown(comparison, "x"), as_template(comparison), *headline(comparison),
        html(comparison, "x").partition("<script")[0],
    ]  # fmt: skip
    assert not any("unseen" in text for text in shown)
    assert "all levels" in shown[0]
    assert "evaluation on all levels" in " ".join(headline(comparison))
    assert tables.as_data(comparison)["groups"][0]["test_levels_reward"] is None
    assert tables.as_data(comparison)["groups"][0]["all_levels_reward"]["mean"] == 5.25

    other = as_coinrun(trained, tmp_path / "other", 3, test=9.0)
    config = yaml.safe_load((other / "config.yaml").read_text())
    config["training"]["learning_rate"] = 0.5
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    mixed = Comparison.load([one, two, other])
    assert mixed.basis[0] == "training"
    assert any("others on all: those do not compare" in note for note in mixed.warnings())
    rows = {line[:33].strip(): line for line in as_template(mixed).splitlines()}
    assert rows["Evaluation, unseen levels"].rstrip().endswith("-")


def test_a_run_counts_once(trained, tmp_path):
    """Given twice, by a link, as a copy or copied and resumed, a run is no second seed."""
    run = shutil.copytree(trained, tmp_path / "run")
    copy = shutil.copytree(trained, tmp_path / "copy")
    (tmp_path / "link").symlink_to(run)
    comparison = Comparison.load([run, tmp_path / "." / "run", tmp_path / "link", copy])
    assert [len(group.runs) for group in comparison.groups] == [1]
    reasons = " ".join(item.reason for item in comparison.left_out)
    assert "by another name; a run counts once" in reasons
    assert f"is a copy of {run}" in reasons
    edit_json(copy / "training_summary.json", run_id=None)
    edit_json(run / "training_summary.json", run_id=None)
    assert [item.path for item in load_runs([run, copy])[1]] == [copy]  # older runs: by all that was measured
    later = shutil.copytree(trained, tmp_path / "later")
    edit_json(later / "training_summary.json", total_timesteps=9000, seed=None)
    config = yaml.safe_load((later / "config.yaml").read_text())
    config["env"]["seed"] = 7
    (later / "config.yaml").write_text(yaml.safe_dump(config))
    notes = Comparison.load([trained, later]).warnings()
    assert any("have one beginning" in note for note in notes)


def test_another_task_is_named_and_not_compared_with_the_published_curve(trained, tmp_path):
    """Plain backgrounds make another task: it has its own table, and no published PPO beside it."""
    run = as_coinrun(trained, tmp_path / "plain", 1)
    usual = as_coinrun(trained, tmp_path / "usual", 2)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["env"]["use_backgrounds"] = False
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    comparison = Comparison.load([run, usual])
    names = [str(task) for task in comparison.tasks]
    assert names == ["coinrun (easy, 200 levels, use_backgrounds off)", "coinrun (easy, 200 levels)"]
    assert [bool(published.curve(task.env)) for task in comparison.tasks] == [False, True]


def test_files_of_different_runs_and_versions_are_named(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    edit_json(run / "training_summary.json", algorithm="A2C")
    assert "are of different runs" in load_runs([run])[1][0].reason
    edit_json(run / "training_summary.json", algorithm="PPO", run_id="x", git_commit="0123456789abcdef")
    log = run / "logs" / "PPO_Sequential" / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: len(lines) // 2]))
    notes = Comparison.load([run, trained]).warnings()
    assert any("the log is of another run, or cut short" in note for note in notes)
    assert any("different versions of the program" in note and "0123456" in note for note in notes)


def test_a_run_names_the_code_that_it_was_started_with(tmp_path, monkeypatch, call):
    """The checkout may be at another commit when a long run ends; the run still is of the code that it had loaded."""
    output = tmp_path / "run"
    monkeypatch.setattr(provenance, "git_commit", lambda: "later" if (output / "config.yaml").exists() else "loaded")
    assert call("train", *TINY, "--total-timesteps", 600, "--output-dir", output)[0] == 0
    assert json.loads((output / "training_summary.json").read_text())["git_commit"] == "loaded"
