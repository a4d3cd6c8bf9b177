"""During a run and after it: `status`, `report`, `diff`, `export` and `verify`."""

from pathlib import Path

import click

from kvbatch.commands.common import guarded, print_json, say
from kvbatch.errors import InputError
from kvbatch.progress.streams import outlets
from kvbatch.text import all_escaped


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def status(run_path: Path, as_json: bool) -> int:
    """Say what RUN is at: runs/<job> for the latest run, or runs/<job>/<run id>."""
    from kvbatch.report.status import load_status, render_status

    found = load_status(run_path)
    if as_json:
        print_json(found)
    else:
        print(render_status(all_escaped(found)))
    return _told(found["problems"])


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def report(run_path: Path, as_json: bool) -> int:
    """Print the summary of RUN and write its page: runs/<job> for the latest run, or runs/<job>/<run id>."""
    from kvbatch.report.html import write_page
    from kvbatch.report.summary import load_summary, render
    from kvbatch.run_dir.find_runs import open_run

    summary = load_summary(run_path, deep=True)
    if as_json:
        print_json(summary)
        return _told(summary["problems"])
    try:
        if not summary["problems"]:  # a page that lacks rows is worse than that of yesterday
            summary["page"] = str(write_page(open_run(run_path)))
    finally:  # the summary can be told of a run whose directory cannot be written
        print(render(all_escaped(summary)))
    return _told(summary["problems"])


@click.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def diff(run_a: Path, run_b: Path, as_json: bool) -> int:
    """Compare RUN_A and RUN_B row by row: memory, speed, answers, quality."""
    from kvbatch.report.diff import compare, render_diff
    from kvbatch.run_dir.find_runs import open_run

    found = compare(open_run(run_a), open_run(run_b))
    if as_json:
        print_json(found)
    else:
        print(render_diff(all_escaped(found)))
    return 0


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["jsonl", "openai-batch", "csv"]),
    default="jsonl",
    show_default=True,
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="A file, which appears when it is whole."
)
@click.option(
    "--raw",
    is_flag=True,
    help="CSV: leave cells as they are; by default ' goes before what a spreadsheet would run as a formula.",
)
@guarded
def export(run_path: Path, format_: str, output: Path | None, raw: bool) -> int:
    """Write the rows of RUN in another format, to stdout or a file."""
    from kvbatch.atomic_file import atomic_file
    from kvbatch.report.export import export_rows
    from kvbatch.report.status import missing_rows
    from kvbatch.run_dir.find_runs import open_run

    run = open_run(run_path)
    if note := missing_rows(run):
        say(note)
    if output:
        with atomic_file(output) as stream:
            export_rows(run, format_, stream, raw=raw)
    else:
        with outlets() as out, out.raising():
            export_rows(run, format_, out.data, raw=raw)
    return 0


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def verify(run_path: Path, as_json: bool) -> int:
    """Read every file of RUN and hold it against what was written; exit 66 if one is missing or damaged."""
    from kvbatch.run_dir.verify import render_verified
    from kvbatch.run_dir.verify import verify as verified

    found = verified(run_path)
    if as_json:
        print_json(found)
    else:
        print(render_verified(all_escaped(found)))
    return InputError.exit_code if found["problems"] else 0


def _told(problems: list[str]) -> int:
    """Say on stderr what is wrong with a run, and return the exit code."""
    for problem in problems:
        say(problem)
    return InputError.exit_code if problems else 0
