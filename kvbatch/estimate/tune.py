"""The smallest cache that keeps a corpus' quality limits: presets, keep ratios and bits, compared on sampled rows."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbatch.estimate.pareto_plot import Point, draw_frontier
from kvbatch.estimate.quality import QualitySample, Verdict, assess
from kvbatch.job_file.sections import CacheSection, QualityGuardSection
from kvbatch.text import escaped
from kvcache.config import PRESETS

if TYPE_CHECKING:
    from kvbatch.opened_job import OpenedJob
    from kvbatch.plan.memory_plan import MemoryPlan
    from kvbatch.progress.display import Progress

# What a job file may say of how much is kept; a candidate says it in their place, and the job's other keys stay.
_KEPT_KEYS = ("preset", "compress_method", "keep_ratio", "quant_bits", "tiers")


def _as_it_is(preset: str) -> dict[str, Any]:
    """Return the keys of a preset with the tiers that most models need, which are then not fitted to the model."""
    tiers = PRESETS[preset].resolved_tiers
    return {"preset": preset, "tiers": tuple(map(astuple, tiers))}


CANDIDATES: Mapping[str, Mapping[str, Any]] = {
    "8 bits": {"compress_method": "quant", "quant_bits": 8},
    "dialogue": _as_it_is("dialogue"),
    "4 bits": {"compress_method": "quant", "quant_bits": 4},
    "default": _as_it_is("default"),
    "0.6 at 4 bits": {"preset": "aggressive", "keep_ratio": 0.6, "quant_bits": 4},
    "aggressive": _as_it_is("aggressive"),
    "logs": _as_it_is("logs"),
    "0.2 at 4 bits": {"preset": "logs", "keep_ratio": 0.2, "quant_bits": 4},
    "extract": _as_it_is("extract"),
}


@dataclass(frozen=True)
class Candidate:
    """A cache policy, as a job file says it, and what it costs."""

    name: str
    keys: Mapping[str, Any]
    verdict: Verdict


def tune(
    opened: "OpenedJob", memory: "MemoryPlan", limits: QualityGuardSection, progress: "Progress"
) -> list[Candidate]:
    """Compare all candidates on a sample; return them by bytes, most first.

    Raises:
        KvbatchError: As `QualitySample`.
    """
    from engine.models.basis import ROTATED

    others = opened.job.cache.model_dump(exclude_none=True, exclude=set(_KEPT_KEYS))
    sections = {name: {**keys, **others} for name, keys in CANDIDATES.items()}
    opened = opened.with_basis(ROTATED)  # candidates that quantize need it
    sample = QualitySample(opened, memory, limits.sample, progress)
    rows = sample.compare({name: CacheSection(**keys).policy for name, keys in sections.items()})
    found = [
        Candidate(name, keys, assess((row for row in rows if row["policy"] == name), limits))
        for name, keys in sections.items()
    ]
    return sorted(found, key=lambda c: -(c.verdict.kv_kept_ratio or 1))


def cheapest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate of the fewest bytes that keeps the limits; None if each that does takes the full cache's."""
    found = next((candidate for candidate in reversed(candidates) if candidate.verdict.holds), None)
    return found if found and (found.verdict.kv_kept_ratio or 1) < 1 else None


def render(candidates: Sequence[Candidate]) -> str:
    """Return the table of all candidates and the job file's section of the cheapest that keeps the limits."""
    lines = [f"{'cache':<14} {'bytes':>7} {'NLL':>8} {'KL':>8} {'same first choice':>18}  limits"]
    for candidate in candidates:
        verdict = candidate.verdict
        if verdict.nll_delta is None:
            lines.append(f"{candidate.name:<14} {escaped(verdict.problems[0])}")
            continue
        lines.append(
            f"{candidate.name:<14} {verdict.kv_kept_ratio:>7.1%} {verdict.nll_delta:>+8.4f} {verdict.kl:>8.4f} "
            f"{verdict.top1_agreement:>18.1%}  {'kept' if verdict.holds else 'not kept'}"
        )
    best = cheapest(candidates)
    lines.append("")
    if best is None and any(candidate.verdict.holds for candidate in candidates):
        lines.append(
            "no candidate takes less than the full cache on these documents: set cache.preset to none"
        )
    elif best is None:
        lines.append("no candidate keeps the limits: run with the full cache, or allow more loss")
    else:
        lines += ["the cheapest that keeps the limits:", "", "cache:"]
        lines += [
            f"  {key}: {json.dumps(value) if key == 'tiers' else value}" for key, value in best.keys.items()
        ]
    return "\n".join(lines)


def plot(candidates: Sequence[Candidate], path: Path) -> None:
    """Draw the bytes of every candidate that could be compared against its divergence."""
    points = [
        Point(c.name, c.verdict.kv_kept_ratio, c.verdict.kl, c.verdict.holds)
        for c in candidates
        if c.verdict.kl is not None and c.verdict.kv_kept_ratio is not None
    ]
    draw_frontier(points, path, full="full cache")
