"""What the dashboard shows: the runs in a directory and the machine they run on, read anew as files change."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from rl_cluster_benchmark.core.text import plain
from rl_cluster_benchmark.run.metrics import WINDOW
from rl_cluster_benchmark.tools.analysis.curves import REWARD
from rl_cluster_benchmark.tools.analysis.runs import RunRecord, UnusableRunError, find_runs, is_running, load_run
from rl_cluster_benchmark.tools.dashboard.run_processes import Processes

MAX_SHOWN = 200  # runs
POINTS = 300
MAX_REASON = 500
METRICS = {"reward": REWARD, "speed": "charts/SPS", "memory": "system/memory_gb", "entropy": "losses/entropy"}
WATCHED = ("config.yaml", "training_summary.json", "metrics.jsonl")


class Directory:
    """The runs in a directory, loaded when their files have changed; a name from outside picks one of these only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._loaded: dict[Path, tuple[Any, RunRecord | str]] = {}
        self._processes = Processes()
        self._lock = threading.Lock()

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            paths = list(find_runs(self.root))
            newest = sorted(paths, key=_last_change, reverse=True)[:MAX_SHOWN]
            memory = psutil.virtual_memory()
            return {
                "directory": plain(str(self.root)),
                "time": time.strftime("%H:%M:%S"),
                "machine": {
                    "cores": self._processes.cores(),
                    "memory_used_gb": (memory.total - memory.available) / 1e9,
                    "memory_gb": memory.total / 1e9,
                },
                "runs": [self._describe(path) for path in newest],
                "hidden": len(paths) - len(newest),
            }

    def series(self, name: str) -> dict[str, Any] | None:
        """Return the curves of one run, by the name that `snapshot` gives it."""
        with self._lock:
            path = next((path for path in find_runs(self.root) if self._name(path) == name), None)
            run = self._load(path) if path is not None else None
        if not isinstance(run, RunRecord):
            return None
        stride = -(-len(run.series["step"]) // POINTS) or 1
        curves = {}
        for label, metric in METRICS.items():
            values = run.series.get(metric)
            if values is None:
                continue
            counts = run.series.get("charts/episodes", values)
            points = list(zip(run.series["step"], run.series["time"], values, counts, strict=True))
            kept = [point for point in [*points[:-1:stride], *points[-1:]] if point[2] == point[2]]
            steps, times, ys, episodes = zip(*kept, strict=True) if kept else ((), (), (), ())
            early = sum(bool(count < WINDOW) for count in episodes) if label == "reward" else 0
            curves[label] = {"step": steps, "time": [t / 60 for t in times], "y": ys, "early": early}
        return finite(curves)

    def _describe(self, path: Path) -> dict[str, Any]:
        """Return what is shown of a run; whatever is wrong with one of them, the others are shown."""
        name = self._name(path)
        try:
            run = self._load(path)
            if isinstance(run, RunRecord):
                return finite(self._facts(name, run))
            reason = run
        except Exception as error:
            reason = f"cannot be read ({type(error).__name__}: {error})"
        return {"name": name, "state": "unreadable", "reason": plain(reason)[:MAX_REASON]}

    def _facts(self, name: str, run: RunRecord) -> dict[str, Any]:
        summary, training = run.summary, run.config.training
        by_steps = summary.total_timesteps / training.total_timesteps
        by_time = summary.duration_hours / training.duration_hours if training.duration_hours else 0.0
        fraction = 1.0 if run.state == "finished" else min(1.0, max(by_steps, by_time))
        seconds = summary.duration_hours * 3600
        is_live = run.state == "running"
        return {
            "name": name,
            "game": run.game,
            **run.facts,
            "fps": summary.final_fps if is_live else summary.avg_fps,
            "reward": summary.final_reward,
            "fraction": fraction,
            "seconds_left": seconds / fraction * (1 - fraction) if is_live and fraction > 0 else None,
            "memory_gb": summary.peak_memory_gb,
            "phases": summary.phase_shares,
            "processes": self._processes.of_run(run.path) if is_live else [],
        }

    def _load(self, path: Path) -> RunRecord | str:
        signature = (is_running(path), *_stamps(path))
        known = self._loaded.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        try:
            run: RunRecord | str = load_run(path)
        except UnusableRunError as error:
            run = str(error)
        self._loaded[path] = (signature, run)
        return run

    def _name(self, path: Path) -> str:
        relative = path.relative_to(self.root)
        name = str(relative) if relative.parts else self.root.name or str(self.root)
        return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in name)  # so that a browser can ask for it


def finite(value: Any) -> Any:
    """Return the value with None for NaN and infinities, of which JSON knows nothing."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _stamps(path: Path) -> tuple[tuple[int, int], ...]:
    files = [path / name for name in WATCHED]
    with contextlib.suppress(OSError):
        files += sorted([*path.glob("logs/*/metrics.jsonl"), *path.glob("eval*.json"), *path.glob("clip.*")])
    return tuple(_stamp(file) for file in files)


def _stamp(file: Path) -> tuple[int, int]:
    try:
        stat = os.lstat(file)
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def _last_change(path: Path) -> int:
    return max((stamp[0] for stamp in _stamps(path)), default=0)
