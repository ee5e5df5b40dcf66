"""PNG curves of a run, drawn from its ``metrics.jsonl``: reward, response length, log-prob gap, timing."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl.train.utils.metrics_file import read_metrics
from skyrl.utils import storage

if TYPE_CHECKING:
    from matplotlib.axes import Axes

logger = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One picture, e.g. ``Plot(name="reward", title="Reward", unit="score", keys=(r"reward/.*",))``."""

    name: str
    """File name without ``.png``."""
    title: str
    """Heading."""
    unit: str
    """Label of the vertical axis."""
    keys: tuple[str, ...]
    """Patterns of whole metric names; each name that matches is a curve."""


PLOTS = (
    Plot(
        name="reward",
        title="Reward",
        unit="score",
        keys=(r"reward/avg_raw_reward", r"reward/avg_pass_at_\d+", r"eval/all/avg_score"),
    ),
    Plot(
        name="response_length",
        title="Response length",
        unit="tokens",
        keys=(r"generate/avg_num_tokens", r"generate/min_num_tokens", r"generate/max_num_tokens"),
    ),
    Plot(
        name="logprob_gap",
        title="Log-prob gap between engine and trainer",
        unit="nats, mean absolute difference",
        keys=(r"policy/rollout_train_logprobs_abs_diff_mean",),
    ),
    Plot(
        name="timing",
        title="Time per step",
        unit="seconds",
        keys=(r"timing/(step|generate|fwd_logprobs_values_reward|train_critic_and_policy|sync_weights|eval)",),
    ),
)


def draw_plots(metrics_path: str, directory: str) -> list[str]:
    """Draw every plot that has a point; return the paths of the pictures.

    Called at every checkpoint and at the end. A picture that cannot be written is left out with a warning, since
    training must not end for it.

    Args:
        metrics_path: the run's ``metrics.jsonl``; absent or empty gives no plots.
        directory: folder of the pictures, made if absent.
    """
    if not os.path.exists(metrics_path):
        return []
    rows = read_metrics(metrics_path)
    drawn = []
    for plot in PLOTS:
        curves = find_curves(rows, plot.keys)
        path = os.path.join(directory, f"{plot.name}.png")
        try:
            if curves:
                storage.write_atomic(path, _picture(plot, curves))
                drawn.append(path)
        except OSError as error:
            logger.warning("Plot %s could not be written: %s", path, error)
    return drawn


def find_curves(rows: Sequence[Row], patterns: Sequence[str]) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of every metric whose whole name matches a pattern, in the patterns' order, gaps left out."""
    names = sorted({key for row in rows for key in row})
    curves = {}
    for pattern in patterns:
        for name in (name for name in names if re.fullmatch(pattern, name)):
            points = [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
            if points:
                curves[name] = ([step for step, _ in points], [float(value) for _, value in points])
    return curves


def _picture(plot: Plot, curves: dict[str, tuple[list[int], list[float]]]) -> bytes:
    # Without pyplot: no global state, any thread, no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    for name, (steps, values) in curves.items():
        axes.plot(steps, values, label=name, marker="o" if len(steps) <= 40 else None, markersize=3, linewidth=1.5)
    axes.set_title(plot.title)
    axes.set_xlabel("step")
    axes.set_ylabel(plot.unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    buffer = io.BytesIO()
    canvas.print_png(buffer)
    return buffer.getvalue()
