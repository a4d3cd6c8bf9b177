"""The frontier of caches: bytes against what they cost, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

from kvbatch.errors import ModelUnavailable, missing_extra

_LEAST_KL = 1e-6  # what a logarithmic axis can show


@dataclass(frozen=True)
class Point:
    """A cache policy's bytes, of the full cache's, and its divergence from it; `holds` if a limit was asked for."""

    name: str
    kv_ratio: float
    kl: float
    holds: bool | None = None


def check_drawing() -> None:
    """Find out whether plots can be drawn, before anything is computed for one.

    Raises:
        ModelUnavailable: matplotlib is not installed.
    """
    if problem := missing_extra("report", "a plot"):
        raise ModelUnavailable(problem)


def draw_frontier(points: Sequence[Point], path: Path, *, full: str) -> None:
    """Draw every policy, and a line through those that nothing beats in both.

    Args:
        full: what the bytes are compared with.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    points = sorted(points, key=lambda point: (point.kv_ratio, point.kl))
    best = [p for i, p in enumerate(points) if all(p.kl < other.kl for other in points[:i])]
    colours = {None: "tab:blue", True: "tab:green", False: "tab:red"}
    figure, axes = pyplot.subplots(figsize=(9, 6))
    axes.plot([p.kv_ratio for p in best], [max(p.kl, _LEAST_KL) for p in best], color="tab:blue", linewidth=1)
    width = max(point.kv_ratio for point in points) - min(point.kv_ratio for point in points)
    named: list[tuple[float, float]] = []
    for point in [*best, *(point for point in points if point not in best)]:
        place = (point.kv_ratio, max(point.kl, _LEAST_KL))
        axes.plot(*place, "o", color=colours[point.holds], alpha=1 if point in best else 0.5, markersize=5)
        is_free = all(abs(place[0] - x) > width / 8 or abs(log10(place[1] / y)) > 0.14 for x, y in named)
        if point in best or is_free:  # of those that lie together, one has its name
            axes.annotate(point.name, place, xytext=(4, 4), textcoords="offset points", fontsize=7)
            named.append(place)
    axes.set(yscale="log", xlabel=f"KV bytes / {full}", ylabel="KL to the full cache, nats a token")
    if any(point.holds is not None for point in points):
        axes.set_title("green keeps the limits", fontsize=9)
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
