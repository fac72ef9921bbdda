"""Does anything grow in a long run? Trains in parallel mode and samples all of its processes every second.

    python bench/soak.py --minutes 60 --output-dir runs/soak [-- --algorithm impala --env coinrun ...]

Memory (proportional set size without files), file descriptors, threads, processes and /dev/shm: over what comes after
the warm-up, a straight line is fitted to each, and what it gains until the end is compared with what is allowed. The
speed of the last tenth must be within 3% of that of the first tenth after the warm-up; where others change the speed of
the machine itself by more than that (a matrix product of always the same size is timed beside it), as a share of it.
Ends with status 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

SECONDS_TO_END = 120
FEWEST_SAMPLES = 50
SPEED = 0.03  # the last tenth may be that much slower or faster than the first
# What a straight line may gain, as a share of the mean and in absolute terms; the larger of both counts.
ALLOWED = {"memory_mb": (0.01, 5.0), "descriptors": (0.0, 0.5), "threads": (0.0, 0.5), "processes": (0.0, 0.5),
           "shm_mb": (0.0, 0.1)}  # fmt: skip
TITLES = {"memory_mb": "Memory (MB)", "descriptors": "File descriptors", "threads": "Threads", "fps": "Steps / s"}


def sample(parent: psutil.Process) -> dict[str, float]:
    """Of the run's processes, together."""
    found = {"memory_mb": 0.0, "descriptors": 0.0, "threads": 0.0, "processes": 0.0}
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.Error), process.oneshot():
            found["memory_mb"] += own_memory(process.pid) / 1e6
            found["descriptors"] += process.num_fds()
            found["threads"] += process.num_threads()
            found["processes"] += 1
    shm = os.statvfs("/dev/shm")
    return found | {"shm_mb": (shm.f_blocks - shm.f_bfree) * shm.f_frsize / 1e6}


def own_memory(pid: int) -> int:
    """Its part of the memory that the run's processes share, and what is its alone; not the libraries, whose pages it
    shares with whatever else runs on this machine: that part changes when others come and go.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        sizes = dict(line.split()[:2] for line in file if line.startswith("Pss_"))
        return 1024 * (int(sizes["Pss_Anon:"]) + int(sizes["Pss_Shmem:"]))
    return 0


def machine_speed(matrix: NDArray[np.float32], products: int = 10) -> float:
    """Matrix products per second of CPU time, on one core, beside the run."""
    began = time.thread_time()
    for _ in range(products):
        np.einsum("ij,jk", matrix, matrix)  # not matrix @ matrix, which takes all cores
    return products / (time.thread_time() - began)


def train(output: Path, minutes: float, more: list[str]) -> list[dict[str, float]]:
    """One sample a second, from the first update to the last."""
    call = [
        sys.executable,
        "-m",
        "rl_cluster_benchmark",
        "train",
        "--mode",
        "parallel",
        "--duration",
        str(minutes / 60),
    ]
    call += ["--total-timesteps", str(10**12), "--output-dir", str(output), "--overwrite", *more]
    began = time.time()
    matrix = np.random.default_rng(0).random((128, 128), dtype=np.float32)
    process = subprocess.Popen(call)
    samples: list[dict[str, float]] = []
    try:
        parent = psutil.Process(process.pid)
        while process.poll() is None and not any(_is_newer(log, began) for log in output.glob("logs/*/metrics.jsonl")):
            time.sleep(0.2)
        start = time.monotonic()
        while process.poll() is None and time.monotonic() - start < minutes * 60 - 2:
            with contextlib.suppress(psutil.Error):
                figures = {"machine": machine_speed(matrix), **sample(parent)}
                samples.append({"time": time.monotonic() - start, **figures})
            time.sleep(max(0.0, start + len(samples) - time.monotonic()))
        if process.wait(timeout=SECONDS_TO_END) != 0:
            sys.exit(f"The run ended with status {process.returncode}.")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return samples


def _is_newer(log: Path, began: float) -> bool:
    """It has lines, and they are of this run."""
    with contextlib.suppress(OSError):
        return log.stat().st_mtime > began and log.stat().st_size > 0
    return False


def judge(samples: list[dict[str, float]], lines: list[dict[str, float]], warm_up: float) -> dict[str, Any]:
    """Every figure, what was allowed, and whether it held."""
    end = samples[-1]["time"]
    late = [s for s in samples if s["time"] >= warm_up * end]
    result: dict[str, Any] = {}
    for name, (share, least) in ALLOWED.items():
        times, values = (np.array([s[key] for s in late]) for key in ("time", name))
        slope, error = line(times, values)
        allowed = max(share * float(values.mean()), least)
        gain, margin = (float(x * (times[-1] - times[0])) for x in (slope, 2 * error))
        result[name] = {"mean": float(values.mean()), "gain": gain, "margin": margin, "allowed": allowed,
                        "good": gain - margin <= allowed}  # fmt: skip
    steps, times = (np.array([point[key] for point in lines]) for key in ("step", "time"))
    begin, tenth = warm_up * times[-1], (1 - warm_up) * times[-1] / 10
    first, last = speed(times, steps, begin, begin + tenth), speed(times, steps, times[-1] - tenth, times[-1])
    before, after = (
        float(np.median([p["machine"] for p in samples if start <= p["time"] <= start + tenth]))
        for start in (begin, times[-1] - tenth)
    )
    ratio, machine = last / first, after / before
    judged = ratio / machine if abs(machine - 1) > SPEED else ratio
    result["fps"] = {"first": first, "last": last, "ratio": ratio, "machine": machine, "by_machine": ratio / machine,
                     "good": abs(judged - 1) <= SPEED}  # fmt: skip
    return result


def line(times: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Least squares: the slope, and its standard error."""
    centred = times - times.mean()
    spread = float(centred @ centred)
    slope = float(centred @ values) / spread
    left = values - values.mean() - slope * centred
    return slope, float(np.sqrt((left @ left) / max(1, len(values) - 2) / spread))


def speed(times: NDArray[np.float64], steps: NDArray[np.float64], start: float, end: float) -> float:
    inside = np.flatnonzero((times >= start) & (times <= end))
    a, b = inside[0], inside[-1]
    return float((steps[b] - steps[a]) / (times[b] - times[a]))


def plot(samples: list[dict[str, float]], lines: list[dict[str, float]], warm_up: float, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(16, 3.4), constrained_layout=True)
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        points = lines if name == "fps" else samples
        axis.plot([p["time"] / 60 for p in points], [p["charts/SPS" if name == "fps" else name] for p in points], lw=1)
        axis.axvspan(0, warm_up * samples[-1]["time"] / 60, color="0.92")
        axis.set_title(title)
        axis.set_xlabel("minutes")
        axis.set_ylim(bottom=0)
    figure.savefig(file, dpi=110)


def table(result: dict[str, Any]) -> str:
    rows = ["| | mean | gain from warm-up to end (± 2 standard errors) | allowed | |", "|-|-|-|-|-|"]
    for name in ALLOWED:
        r = result[name]
        figures = f"{r['mean']:.1f} | {r['gain']:+.2f} ± {r['margin']:.2f} | {r['allowed']:.2f}"
        rows.append(f"| {name} | {figures} | {'good' if r['good'] else 'BAD'} |")
    f = result["fps"]
    figures = f"{f['first']:,.0f} at first, {f['last']:,.0f} at last | {f['ratio'] - 1:+.1%} | ±{SPEED:.0%}"
    rows.append(f"| steps/s | {figures} | {'good' if f['good'] else 'BAD'} |")
    figures = f"{f['machine'] - 1:+.1%} | {f['by_machine'] - 1:+.1%}"
    return "\n".join([*rows, f"| the machine's own speed, and steps/s as a share of it | {figures} | | |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="default: 60")
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the run that is left out; default: 0.1")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/soak"), help="default: runs/soak")
    parser.add_argument("train", nargs=argparse.REMAINDER, metavar="-- ...", help="further arguments of rlcb train")
    args = parser.parse_args()
    samples = train(args.output_dir, args.minutes, [word for word in args.train if word != "--"])
    if len(samples) < FEWEST_SAMPLES:
        sys.exit(f"{len(samples)} samples say nothing; --minutes 1 is the least.")
    log = next(args.output_dir.glob("logs/*/metrics.jsonl"))
    lines = [json.loads(text) for text in log.read_text().splitlines()]
    result = judge(samples, lines, args.warm_up)
    (args.output_dir / "soak.json").write_text(json.dumps({"result": result, "samples": samples}) + "\n")
    plot(samples, lines, args.warm_up, args.output_dir / "soak.png")
    print(table(result))
    print(f"{len(samples):,} samples; {args.output_dir / 'soak.json'} and soak.png hold them.")
    return 0 if all(part["good"] for part in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
