"""The figures of a sweep: a row for each number of workers, as a table, JSON, CSV and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark.core import text
from rl_cluster_benchmark.core.atomic_files import write_atomically, write_json
from rl_cluster_benchmark.tools.reports.plots import draw_counts_axis, open_figure, save_figure
from rl_cluster_benchmark.tools.scaling.cases import Case
from rl_cluster_benchmark.tools.scaling.measured_runs import Rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUIET = 0.95  # of a core for each single-threaded run; less means that something else had the rest
TOGETHER, INDEPENDENT, IDEAL = "tab:blue", "tab:orange", "silver"
FILES = ("scaling.json", "scaling.csv", "scaling.png")


@dataclass(frozen=True)
class Round:
    """A case measured once: the workers together and the independent runs, in turns."""

    together: Rate
    independents: list[Rate]

    @property
    def independent_fps(self) -> float:
        return sum(rate.fps for rate in self.independents)

    @property
    def of_machine(self) -> float:
        """Return what the workers make of what the cores give when nobody waits for anybody."""
        return self.together.fps / self.independent_fps

    @property
    def independent_cpu(self) -> float:
        """Return how many cores an independent run had, on average."""
        return sum(rate.busy_cores for rate in self.independents) / len(self.independents)

    @property
    def of_slowest(self) -> float:
        """Return what would be kept if all kept step with the slowest independent run, each doing its own share."""
        return min(rate.fps for rate in self.independents) * len(self.independents) / self.independent_fps


def make_rows(cases: Sequence[Case], rounds: Sequence[Sequence[Round]]) -> list[dict[str, Any]]:
    """Return a row for every case that was measured, medians over its rounds. The first case has one worker."""
    rows: list[dict[str, Any]] = []
    for case, measured in zip(cases, rounds, strict=True):
        if not measured:
            break
        fps = median(r.together.fps for r in measured)
        independent_fps = median(r.independent_fps for r in measured)
        one = rows[0] if rows else {"fps": fps, "independent_fps": independent_fps}
        memories = [r.together.summary["memory_per_worker_mb"] or 0.0 for r in measured]
        rows.append(
            {
                "workers": case.workers,
                "num_envs": case.num_envs,
                "envs_per_worker": case.envs_per_worker,
                "fps": fps,
                "independent_fps": independent_fps,
                "of_machine": median(r.of_machine for r in measured),
                "of_slowest": median(r.of_slowest for r in measured),
                "speedup": fps / one["fps"],
                "efficiency": fps / one["fps"] / case.workers,
                "independent_speedup": independent_fps / one["independent_fps"],
                "independent_efficiency": independent_fps / one["independent_fps"] / case.workers,
                "independent_cpu": min(r.independent_cpu for r in measured),
                "communication": median(r.together.shares["communication"] for r in measured),
                "waiting": median(r.together.shares["waiting"] for r in measured),
                "memory_per_worker_mb": max(memories),
                "updates": sum(r.together.updates for r in measured),
                "seconds": sum(r.together.seconds for r in measured),
                "rounds": [_round_record(r) for r in measured],
            }
        )
    return rows


def _round_record(measured: Round) -> dict[str, Any]:
    return {
        "fps": measured.together.fps,
        "independent_fps": [rate.fps for rate in measured.independents],
        "of_machine": measured.of_machine,
        "phase_shares": measured.together.shares,
    }


# (head, key, format)
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("workers", "workers", "d"),
    ("envs each", "envs_per_worker", "d"),
    ("FPS", "fps", ",.0f"),
    ("independent", "independent_fps", ",.0f"),
    ("of machine", "of_machine", ".1%"),
    ("of slowest", "of_slowest", ".1%"),
    ("speed-up", "speedup", ".2f"),
    ("efficiency", "efficiency", ".1%"),
    ("indep. eff.", "independent_efficiency", ".1%"),
    ("comm.", "communication", ".1%"),
    ("waiting", "waiting", ".1%"),
    ("MB/worker", "memory_per_worker_mb", ".0f"),
)
LEGEND = """\
FPS          environment steps per second, all workers together
independent  the sum of as many single-worker runs side by side: the same work each, no communication
of machine   the first over the second: what is kept of what the cores give
of slowest   what would be kept if each did its own share in step with the slowest independent run
efficiency   speed-up over one worker, divided by the workers; indep. eff. is that of the independent runs
comm.        share of the time spent on summing, besides waiting for others"""


def table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [[format(row[key], spec) for _, key, spec in COLUMNS] for row in rows]
    return "\n".join(text.table([head for head, _, _ in COLUMNS], cells))


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """Say in a sentence what the largest number of workers has reached."""
    last = rows[-1]
    return (
        f"{last['workers']} workers are {last['speedup']:.2f} times as fast as 1; {last['workers']} independent runs "
        f"reach {last['independent_speedup']:.2f} times. The workers make {last['of_machine']:.1%} of what the machine "
        f"gives."
    )


def disturbed(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return a warning if the cores were not ours alone, else None."""
    least = min(rows, key=lambda row: row["independent_cpu"])
    if least["independent_cpu"] >= QUIET:
        return None
    return (
        f"Warning: the independent runs of {least['workers']} had {least['independent_cpu']:.0%} of a core each: "
        "something else was running, and these figures say little. Repeat them on a quiet machine."
    )


def write_files(folder: Path, report: dict[str, Any]) -> None:
    """Write all three files whole; a sweep that goes on replaces them."""
    write_json(folder / "scaling.json", report)
    flat = [{key: value for key, value in row.items() if key != "rounds"} for row in report["rows"]]
    write_atomically(folder / "scaling.csv", text.as_csv(flat).encode())
    _draw(report, folder / "scaling.png")


def _draw(report: dict[str, Any], file: Path) -> None:
    """Draw the picture of a scaling.json."""
    rows = report["rows"]
    workers = [row["workers"] for row in rows]
    figure, axes = open_figure(1, 4, (17, 4.2))
    speed, speedup, efficiency, time = axes[0]
    ideal = {"color": IDEAL, "linestyle": "--", "label": "ideal"}

    speed.plot(workers, [w * rows[0]["independent_fps"] for w in workers], **ideal)
    _curves(speed, rows, "fps", "independent_fps")
    speed.set(title="Speed", ylabel="environment steps / s")
    speedup.plot(workers, workers, **ideal)
    _curves(speedup, rows, "speedup", "independent_speedup")
    speedup.set(title="Speed-up", ylabel="times one worker")
    efficiency.axhline(100, **ideal)
    _curves(efficiency, rows, "efficiency", "independent_efficiency", scale=100)
    of_machine = [100 * row["of_machine"] for row in rows]
    efficiency.plot(workers, of_machine, "s:", color="tab:green", label="together / independent")
    efficiency.set(title="Efficiency", ylabel="%")
    for axis in (speed, speedup, efficiency):
        draw_counts_axis(axis, workers, "workers")
        axis.set_ylim(bottom=0)
    _bars(time, rows)
    envs = f"{rows[0]['num_envs']} environments" + (" per worker" if report["scaling"] == "weak" else " in all")
    figure.suptitle(f"{report['algorithm']} on {report['env']}, {envs} ({report['cpu_model']})")
    save_figure(figure, file)


def _curves(axis: Axes, rows: list[dict[str, Any]], together: str, independent: str, scale: float = 1) -> None:
    workers = [row["workers"] for row in rows]
    axis.plot(workers, [scale * row[independent] for row in rows], "o-", color=INDEPENDENT, label="independent runs")
    axis.plot(workers, [scale * row[together] for row in rows], "o-", color=TOGETHER, label="workers together")


def _bars(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw where the workers' time goes, from the last round of each."""
    places = range(len(rows))
    bottom = [0.0] * len(rows)
    for phase in rows[0]["rounds"][-1]["phase_shares"]:
        heights = [100 * row["rounds"][-1]["phase_shares"][phase] for row in rows]
        axis.bar(places, heights, bottom=bottom, label=phase)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axis.set_xticks(list(places), [str(row["workers"]) for row in rows])
    axis.set(title="Time of the workers", xlabel="workers", ylabel="%", ylim=(0, 100))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, reverse=True)
