"""Reading metrics.jsonl: whole, sampled, damaged, hostile."""

import json
import shutil
import time
import tracemalloc

import numpy as np
from helpers.run_copies import edit_json

from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.tools.analysis import series
from rl_cluster_benchmark.tools.analysis.series import read_points, read_series


def line(step, **more):
    return json.dumps({"step": step, "time": step / 10, "update": step, **more})


def test_a_small_log_is_read_whole(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join(line(i, **{"charts/SPS": 2.0 * i}) for i in range(1, 51)) + "\n")
    columns = read_series(log)
    assert columns["step"].tolist() == list(range(1, 51))
    assert columns["charts/SPS"].tolist() == [2.0 * i for i in range(1, 51)]


def test_whatever_is_no_line_of_numbers_is_left_out(tmp_path):
    log = tmp_path / "metrics.jsonl"
    good = [line(1), line(2, **{"charts/SPS": 5.0}), line(3)]
    bad = ["", "{", "[1]", "null", '{"step": 9}', line(-1), "\x00\xff", "[" * 100_000]
    bad += ['{"step": "one", "time": 1, "update": 1}']
    bad += ['{"step": 1e999, "time": 1, "update": 1}', '{"step": true, "time": 1, "update": 1}']
    bad += ['{"step": ' + "9" * 5000 + ', "time": 1, "update": 1}']
    hostile = line(4, **{"charts/SPS": "<script>", "losses/a": float("nan"), "losses/b": None, "other": 1})
    log.write_bytes("\n".join([*good, *bad, hostile, line(2), line(5)[:-3]]).encode("utf-8", "replace"))
    points = read_points(log)
    assert [point["step"] for point in points] == [1, 2, 3, 4]
    assert points[1]["charts/SPS"] == 5.0
    assert set(points[3]) == {"step", "time", "update"}
    assert np.isnan(read_series(log)["charts/SPS"][0])


def test_an_empty_log_has_empty_columns(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("")
    assert len(read_series(log)["step"]) == 0


def test_thousands_of_short_lines_are_thinned_and_the_last_stays(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text("\n".join(line(i) for i in range(1, 30_001)) + "\n")
    steps = read_series(log)["step"]
    assert len(steps) <= series.MAX_POINTS + 2
    assert (steps[0], steps[-1]) == (1, 30_000)
    assert np.diff(steps).max() <= 2 * np.median(np.diff(steps))


def write_lines(path, count):
    """`count` lines fast: a block of characters in which only the digits change; JSON allows spaces before them."""
    template = np.frombuffer(b'{"step":         ,"time": 1.0,"update": 1,"charts/SPS": 100.0}\n', dtype=np.uint8)
    with open(path, "wb") as file:
        for start in range(0, count, 500_000):
            numbers = np.arange(start + 1, min(count, start + 500_000) + 1)
            block = np.tile(template, (len(numbers), 1))
            for digit in range(8):
                value = numbers // 10**digit
                block[:, 16 - digit] = np.where(value > 0, ord("0") + value % 10, ord(" "))
            file.write(block.tobytes())


def test_ten_million_lines_load_in_seconds_and_in_a_few_megabytes(tmp_path):
    log = tmp_path / "metrics.jsonl"
    write_lines(log, 10_000_000)
    assert log.stat().st_size > 600_000_000
    tracemalloc.start()
    start = time.perf_counter()
    columns = read_series(log)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    log.unlink()
    assert seconds < 10
    assert peak < 50e6
    assert (columns["step"][0], columns["step"][-1]) == (1, 10_000_000)
    assert series.MAX_POINTS * 0.99 <= len(columns["step"]) <= series.MAX_POINTS + 2
    assert np.diff(columns["step"]).max() < 1.1 * 10_000_000 / series.MAX_POINTS + 2


def test_an_update_without_new_steps_is_kept(trained, tmp_path, call):
    """An update of IMPALA may only replay: a log that ends with one is not said to be cut short."""
    run = shutil.copytree(trained, tmp_path / "run")
    log = next(run.glob("logs/*/metrics.jsonl"))
    last = json.loads(log.read_text().splitlines()[-1])
    interval = configs.load(run / "config.yaml").training.log_interval
    replays = [last | {"update": last["update"] + number * interval} for number in (1, 2)]
    with log.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in replays)
    edit_json(run / "training_summary.json", total_updates=replays[-1]["update"])
    assert "cut short" not in call("runs", run)[1]
    assert read_series(log)["update"].tolist()[-3:] == [last["update"], *(line["update"] for line in replays)]
