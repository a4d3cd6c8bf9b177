"""Before a run: `validate`, `plan`, `quality`, `tune`, `inspect` and `schema`."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbatch.commands.common import OVERRIDES, guarded, print_json, wants_json
from kvbatch.errors import JobFileError, LimitExceeded
from kvbatch.progress.streams import outlets
from kvbatch.text import escaped

if TYPE_CHECKING:
    from kvbatch.job_file.sections import Job, QualityGuardSection

_SAMPLE = click.option(
    "--sample", type=click.IntRange(min=1), help="Rows to compare; as the job says, or 20."
)


def _limits(job: "Job", **given: Any) -> "QualityGuardSection":
    """Return the job's quality guard, or the default one, with what the command line changes."""
    from kvbatch.job_file.sections import QualityGuardSection

    guard = job.quality_guard or QualityGuardSection()
    return guard.model_copy(update={name: value for name, value in given.items() if value is not None})


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@OVERRIDES
@click.option(
    "--what-if", "what_if", multiple=True, metavar="KEY=VALUE", help="Compare: cache.keep_ratio=0.3."
)
@click.option("--measure", is_flag=True, help="Measure the speed on a few rows, with the weights.")
@click.option("--price-per-hour", type=click.FloatRange(min=0), metavar="PRICE", help="Say what it costs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def plan(
    job_file: Path,
    overrides: tuple[str, ...],
    what_if: tuple[str, ...],
    measure: bool,
    price_per_hour: float | None,
    as_json: bool,
) -> int:
    """Say what the job of JOB_FILE will do, need and take; the next run uses this plan."""
    from kvbatch.estimate.plan_text import render, to_json
    from kvbatch.estimate.preview import plan_job
    from kvbatch.job_file.load import load_job
    from kvbatch.signals import stop_on_signals

    job = load_job(job_file, overrides)
    other = load_job(job_file, (*overrides, *what_if)) if what_if else None
    with stop_on_signals() as stopper:
        view = plan_job(job, what_if=what_if, other=other, measures=measure, stopper=stopper)
    if as_json:
        print_json(to_json(view, price_per_hour))
    else:
        print(render(view, price_per_hour))
    return 0


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@OVERRIDES
@_SAMPLE
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with every sampled row.")
@guarded
def quality(job_file: Path, overrides: tuple[str, ...], sample: int | None, as_json: bool) -> int:
    """Compare the cache of JOB_FILE with the full one, on a sample of its rows; exit 65 over a limit."""
    from kvbatch.estimate.calibration import calibrated
    from kvbatch.estimate.quality import QualitySample, assess
    from kvbatch.job_file.load import load_job
    from kvbatch.opened_job import opened_job
    from kvbatch.signals import stop_on_signals

    job = load_job(job_file, overrides)
    limits = _limits(job, sample=sample)
    if not job.cache.policy.compresses:
        raise JobFileError("the job keeps the full cache, so nothing can be lost; set cache.preset")
    with stop_on_signals() as stopper, opened_job(job, stopper=stopper) as (opened, progress):
        opened = calibrated(opened, progress)
        progress.start("comparing")
        sampled = QualitySample(opened, opened.plan_memory(), limits.sample, progress)
        rows = sampled.compare({"job": opened.policy})
    verdict = assess(rows, limits)
    if as_json:
        print_json(asdict(verdict) | {"rows": rows})
    else:
        print(f"quality      {escaped(str(verdict))}")
        for problem in verdict.problems:
            print(f"limit        {escaped(problem)}")
    return 0 if verdict.holds else LimitExceeded.exit_code


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@OVERRIDES
@_SAMPLE
@click.option("--max-nll-delta", type=float, metavar="NATS", help="Limit; as the job says, or 0.03.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def tune(
    job_file: Path,
    overrides: tuple[str, ...],
    plot_file: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Find the cheapest cache that keeps the quality limits on a sample of the rows of JOB_FILE."""
    from kvbatch.estimate import tune
    from kvbatch.estimate.pareto_plot import check_drawing
    from kvbatch.job_file.load import load_job
    from kvbatch.opened_job import opened_job
    from kvbatch.signals import stop_on_signals

    if plot_file:
        check_drawing()
    job = load_job(job_file, overrides)
    limits = _limits(job, **given)
    with stop_on_signals() as stopper, opened_job(job, stopper=stopper) as (opened, progress):
        progress.start("comparing")
        found = tune.tune(opened, opened.plan_memory(), limits, progress)
    if plot_file:
        tune.plot(found, plot_file)
    best = tune.cheapest(found)
    if as_json:
        candidates = [
            {"name": c.name, "cache": dict(c.keys), "holds": c.verdict.holds, **asdict(c.verdict)}
            for c in found
        ]
        print_json({"best": best and best.name, "candidates": candidates})
    else:
        print(tune.render(found))
    return 0 if any(c.verdict.holds for c in found) else LimitExceeded.exit_code


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--id", "id_column", metavar="COLUMN", help="Column of the row ids.")
@click.option("--text", "text_column", metavar="COLUMN", help="Column of the texts, 'text' by default.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", "jsonl", "parquet", "openai-batch"]),
    default="auto",
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, a summary last.")
@guarded
def inspect(
    inputs: tuple[str, ...],
    id_column: str | None,
    text_column: str | None,
    format_: Any,
    as_json: bool,
) -> int:
    """Show what would be read from INPUT..., without loading a model."""
    from kvbatch.corpus import InputSpec
    from kvbatch.corpus.inspect import run_inspect

    spec = InputSpec(paths=inputs, format=format_, id_column=id_column, text_column=text_column)
    with outlets() as out, out.raising():
        return run_inspect(spec, as_json=as_json, out=out, err=sys.stderr)


@click.command()
@click.option("--markdown", "as_markdown", is_flag=True, help="The keys as a Markdown table instead.")
@click.option("--json", "as_json", is_flag=True, help="The JSON schema, on a terminal too.")
@guarded
def schema(as_markdown: bool, as_json: bool) -> int:
    """Print every key of a job file; where stdout is no terminal, the JSON schema that editors check job files by."""
    from kvbatch.job_file.reference import json_schema, listing, markdown

    if as_markdown:
        print(markdown())
    elif wants_json(as_json):
        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    else:
        print(listing(shutil.get_terminal_size().columns))
    return 0


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@OVERRIDES
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def validate(job_file: Path, overrides: tuple[str, ...], as_json: bool) -> int:
    """Check the job of JOB_FILE, its input, model and output; needs no GPU and no weights."""
    from kvbatch.commands.validate import run_validate

    return run_validate(job_file, overrides, as_json=as_json, out=sys.stdout)
