"""A policy's history as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_info


def draw_history(history: Sequence[tuple[int, Mapping[str, float]]], title: str, path: Path) -> None:
    """Draw each metric over the optimizer steps, one panel per group (``group/name``).

    Args:
        history: (step, metrics) in the order they came.
        title: Above the panels.
        path: Where the PNG goes. Without matplotlib nothing is drawn, and a line says so.
    """
    if importlib.util.find_spec("matplotlib") is None:
        rank_zero_info(f"{title}: no figure, as matplotlib is not installed (`pip install 'lightning-megatrain[plots]'`).")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for step, metrics in history:
        for name, value in metrics.items():
            group, _, line = name.rpartition("/")
            groups.setdefault(group or line, {}).setdefault(line, []).append((step, value))
    if not groups:
        return
    figure = Figure(figsize=(7, 2.6 * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (group, lines) in zip(figure.subplots(len(groups), 1, squeeze=False)[:, 0], groups.items(), strict=True):
        for line, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None, label=line, drawstyle="steps-post")
        axes.set_ylabel(group)
        axes.set_xlabel("optimizer step")
        if len(lines) > 1:
            axes.legend(fontsize="small")
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
