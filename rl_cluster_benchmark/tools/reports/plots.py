"""The curves of a run as a PNG."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_cluster_benchmark import __version__
from rl_cluster_benchmark.config import config_files as configs
from rl_cluster_benchmark.config.schema import EnvConfig
from rl_cluster_benchmark.core.errors import UserError
from rl_cluster_benchmark.core.output_files import MARK_OF_PLOTS, check_output, check_own, write_output
from rl_cluster_benchmark.env import published
from rl_cluster_benchmark.run.metrics import WINDOW
from rl_cluster_benchmark.tools.analysis.curves import REWARD
from rl_cluster_benchmark.tools.analysis.groups import published_until
from rl_cluster_benchmark.tools.analysis.series import read_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# (title, axis label, {metric: label})
PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Episode reward", "mean of 100 episodes", {REWARD: "this run"}),
    ("Speed", "environment steps / s", {"charts/SPS": "FPS"}),
    ("Policy loss", "", {"losses/policy_loss": "policy"}),
    ("Value loss", "", {"losses/value_loss": "value"}),
    ("Entropy", "nats", {"losses/entropy": "entropy"}),
    ("Update size", "", {"losses/approx_kl": "approximate KL", "losses/clipfrac": "clip fraction"}),
    ("Explained variance", "", {"losses/explained_variance": "explained variance"}),
    ("Memory", "GB", {"system/memory_gb": "memory"}),
]


def plot_metrics(log_file: str | Path, output: str | Path | None = None) -> Path:
    """Draw every panel over environment steps; return the PNG's path."""
    log_file = Path(log_file)
    try:
        lines = read_points(log_file)
    except OSError as error:
        raise UserError(f"{log_file} cannot be read ({error.strerror}).") from None
    if not lines:
        raise UserError(f"{log_file} holds no metrics; give the metrics.jsonl of a run that has made an update.")
    if output is None:
        check_own(log_file.with_name("metrics.png"), MARK_OF_PLOTS, "name a file with --output")
    output = picture_file(output or log_file.with_name("metrics.png"))
    check_output("--output", output, [log_file])
    figure, axes = open_figure(2, 4, figsize=(17, 7))
    from matplotlib.ticker import EngFormatter, MaxNLocator

    for axis, (title, label, names) in zip(axes.flat, PANELS, strict=True):
        for name, legend in names.items():
            _draw(axis, [line for line in lines if name in line], name, legend)
        axis.set_title(title)
        axis.set_xlabel("environment steps")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.set_xlim(left=0)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))  # 500k, 2M
        if len(names) > 1:
            axis.legend(frameon=False)
    for axis in (axes[0, 1], axes[1, 3]):
        axis.set_ylim(0, 1.1 * max(axis.dataLim.ymax, 1e-9))
    env = _env_of(log_file)
    if env is not None:
        figure.suptitle(f"{env.name}, seed {env.seed}")
        draw_published(axes[0, 0], env, max(line["step"] for line in lines))
        axes[0, 0].legend(frameon=False)
    return save_figure(figure, output)


def open_figure(rows: int, columns: int, figsize: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Return a figure and its axes [rows, columns]; `options` are for pyplot.subplots."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise UserError("Plots need matplotlib: pip install matplotlib.") from None
    return plt.subplots(rows, columns, figsize=figsize, constrained_layout=True, squeeze=False, **options)


def draw_counts_axis(axis: Axes, counts: Sequence[int], label: str) -> None:
    """Make the horizontal axis one of numbers that double, of workers or machines, with a grid and a legend."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize="small")


def picture_file(name: str | Path) -> Path:
    """Return the path of a picture: a PNG, if the name does not say otherwise."""
    path = Path(name)
    return path if path.suffix or path.exists() else path.with_name(f"{path.name}.png")


def save_figure(figure: Any, output: Path) -> Path:
    import matplotlib.pyplot as plt

    content = io.BytesIO()
    kind = output.suffix.removeprefix(".").lower() or "png"
    mark = {"Software": f"rlcb {__version__}"} if kind == "png" else None
    try:
        figure.savefig(content, dpi=110, format=kind, metadata=mark)
    except ValueError as error:
        raise UserError(f"Cannot write {output} ({error}).") from None
    finally:
        plt.close(figure)
    write_output(output, content.getvalue())
    return output


def _draw(axis: Axes, lines: list[dict[str, float]], name: str, legend: str) -> None:
    """Draw one curve; mean rewards of the first, short episodes, before others have ended, are drawn faintly."""
    steps, values, first = [line["step"] for line in lines], [line[name] for line in lines], 0
    if name == REWARD:
        first = next((i for i, line in enumerate(lines) if line.get("charts/episodes", 0) >= WINDOW), len(lines))
        if first and len(lines) > 1:
            label = f"before {WINDOW} episodes ended: short ones only"
            axis.plot(steps[: first + 1], values[: first + 1], ":", color="silver", label=label)
            axis.legend(frameon=False)
    axis.plot(steps[first:], values[first:], label=legend, linewidth=1.4)


def draw_published(axis: Axes, env: EnvConfig, last_step: float) -> None:
    """Draw the published curve as far as it lies in the picture, or say where it begins."""
    points = published_until(env, last_step)
    if points:
        steps, means, stds = zip(*points, strict=True)
        axis.errorbar(
            steps, means, [2 * std for std in stds], fmt="o--", color="gray", capsize=3, label="published PPO ± 2 sd"
        )
    elif whole := published.curve(env):
        text = f"published PPO: {whole[0].mean:.2f} at {whole[0].step / 1e6:g} million steps"
        axis.plot([], [], " ", label=text)


def _env_of(log_file: Path) -> EnvConfig | None:
    """Return the environment of the run that a log belongs to: config.yaml is beside it or two folders up."""
    for candidate in (log_file.parent / "config.yaml", log_file.parent.parent.parent / "config.yaml"):
        if candidate.is_file():
            with contextlib.suppress(UserError):  # somebody else's config.yaml
                return configs.load(candidate, configs.AS_IT_WAS).env
    return None
