"""Plots as inline SVG. Their colours are the page's, by name, so that light, dark and print need no second drawing."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from kvbatch.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

from kvbatch.report.html.figures import Bins, Columns, Lengths

_UNITS = ((1, "bytes"), (1 << 10, "KiB"), (1 << 20, "MiB"), (1 << 30, "GiB"))
# matplotlib draws in these; each is then replaced by the custom property of the style sheet.
_NAMES = ("ink", "muted", "grid", "one", "two", "three")
_INK, _MUTED, _GRID, _ONE, _TWO, _THREE = _COLOURS = [f"#fe01{i:02x}" for i in range(len(_NAMES))]
_WIDTH_IN, _HEIGHT_IN = 5.4, 2.2
_STYLE: dict[Any, Any] = {  # matplotlib's stubs know each key by its literal name
    "svg.fonttype": "none",
    "svg.hashsalt": "kvbatch",  # the same figures give the same bytes
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "grid.color": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "ytick.left": False,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
}


def draw_throughput(timeline: Columns) -> str:
    """Tokens per second over time."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(timeline["elapsed_s"], timeline["tokens_per_s"], color=_ONE, linewidth=1.4, gid="tokens")
        axes.set(xlabel="seconds", ylabel="tokens/s", ylim=(0, None), xlim=(0, timeline["elapsed_s"][-1]))
        _count_axis(axes.yaxis)

    return _svg("throughput", "Tokens per second over time", draw)


def draw_kv_bytes(timeline: Columns, pool_bytes: int | None) -> str:
    """Bytes of the page pool over time: used, reserved, and all there are."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        seconds = timeline["elapsed_s"]
        most = max(pool_bytes or 0, *timeline["kv_reserved_bytes"], *timeline["kv_used_bytes"])
        unit, name = max(((size, name) for size, name in _UNITS if size <= most), default=_UNITS[0])
        used, reserved = (
            [value / unit for value in timeline[key]] for key in ("kv_used_bytes", "kv_reserved_bytes")
        )
        axes.fill_between(seconds, used, color=_ONE, alpha=0.25, linewidth=0)
        axes.plot(seconds, used, color=_ONE, linewidth=1.4, label="used", gid="used")
        axes.plot(seconds, reserved, color=_TWO, linewidth=1.2, label="reserved", gid="reserved")
        if pool_bytes:
            axes.axhline(
                pool_bytes / unit, color=_MUTED, linewidth=1, linestyle=(0, (4, 3)), label="pool", gid="pool"
            )
        axes.set(xlabel="seconds", ylabel=name, ylim=(0, None), xlim=(0, seconds[-1]))
        _legend(axes)

    return _svg("kv-bytes", "KV bytes over time", draw)


def draw_lengths(lengths: Lengths) -> str:
    """Rows by prompt length, and below them the bin that each row was packed into."""

    def draw(figure: Figure) -> None:
        packed = lengths["packed"]
        heights = (3, 2) if packed["bin"] else (1,)
        top, *below = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights).flat
        width = lengths["class_tokens"]
        bottom = [0] * len(next(iter(lengths["counts"].values())))
        colours = {
            "fits": _ONE,
            "refused": _THREE,
        }  # and what a job does with long documents, which is one thing
        for name, counts in lengths["counts"].items():
            lefts = [i * width for i in range(len(counts))]
            bars = top.bar(
                lefts, counts, width * 0.94, bottom, align="edge", color=colours.get(name, _TWO), label=name
            )
            for i, bar in enumerate(bars):
                bar.set_gid(f"{name}-{i}")
            bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
        top.set(ylabel="rows")
        _count_axis(top.yaxis)
        if len(lengths["counts"]) > 1:
            _legend(top)
        for axes in below:
            axes.plot(
                packed["prompt_tokens"], packed["bin"], "o", color=_ONE, ms=4, alpha=0.7, mew=0, gid="rows"
            )
            axes.set(ylabel="bin", ylim=(max(packed["bin"]) + 0.7, -0.7))
            _count_axis(axes.yaxis)
        last = [top, *below][-1]
        last.set(xlabel="prompt tokens")
        _count_axis(last.xaxis)

    return _svg("lengths", "Rows by prompt length, and the bins they were packed into", draw, height_in=3.1)


def draw_packing(bins: Bins) -> str:
    """How much of the pool every bin fills."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        values = bins["packing_efficiency"]
        edges = [number - 0.5 for number in (*bins["bin"], bins["num_bins"])]
        axes.stairs(values, edges, fill=True, color=_ONE, alpha=0.8, gid="bins")
        axes.axhline(bins["mean_efficiency"], color=_TWO, linewidth=1.2, label="mean", gid="mean")
        axes.set(xlabel="bin", xlim=(edges[0], edges[-1]), ylim=(0, 1.02))
        _share_axis(axes)
        _count_axis(axes.xaxis)
        _legend(axes)

    return _svg("packing", "Share of the page pool that each bin fills", draw, height_in=1.9)


_KEPT_AXES = (("x", "prompt_tokens"), ("y", "kv_kept_ratio"))


def draw_kept(kept: Columns) -> str:
    """The share of the full cache's bytes that each row kept, against its length."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot(
            kept["prompt_tokens"],
            kept["kv_kept_ratio"],
            "o",
            color=_ONE,
            ms=4.5,
            alpha=0.7,
            mew=0,
            gid="rows",
        )
        room = {
            f"{axis}lim": (0, 1.08 * max(kept[name])) for axis, name in _KEPT_AXES
        }  # for the outermost rows
        axes.set(xlabel="prompt tokens", ylabel="bytes kept / full", **room)
        _share_axis(axes)
        _count_axis(axes.xaxis)

    return _svg("kept", "Share of KV bytes kept against prompt length", draw)


def draw_quality(rows: list[dict[str, Any]]) -> str:
    """By how much less likely the full cache holds each sampled row's answer, against the row's length."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axhline(0, color=_MUTED, linewidth=1)
        lengths, deltas = ([row[name] for row in rows] for name in ("prompt_tokens", "nll_delta"))
        axes.plot(lengths, deltas, "o", color=_ONE, ms=4.5, alpha=0.7, mew=0, gid="rows")
        axes.set(xlabel="prompt tokens", ylabel="NLL against full cache")
        _count_axis(axes.xaxis)

    return _svg("quality", "Change of negative log-likelihood against prompt length", draw)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0, handlelength=1.4)


def _count_axis(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _share_axis(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))


def _svg(name: str, title: str, draw: Callable[[Figure], None], height_in: float = _HEIGHT_IN) -> str:
    """Return a plot as an `<svg>` element whose ids are unique in the page; a sentence where nothing can draw it."""
    if problem := missing_extra("report", "this chart"):
        return f'<p class="muted">{escape(problem)}</p>'
    import matplotlib as mpl
    from matplotlib.figure import Figure

    stream = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure = Figure((_WIDTH_IN, height_in), layout="constrained")
        draw(figure)
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{name}-", text)
    for colour, property_ in zip(_COLOURS, _NAMES, strict=True):
        text = text.replace(colour, f"var(--{property_})")
    size = re.search(r'viewBox="([^"]+)"', text)
    assert size, "matplotlib gives every drawing a viewBox"
    head = f'<svg class="plot" id="plot-{name}" viewBox="{size[1]}" role="img" aria-label="{title}">'
    return head + text[text.index(">") + 1 :]
