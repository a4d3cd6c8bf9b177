"""During a run and after it: `status`, `report`, `diff`, `export` and `verify`."""

from pathlib import Path
from typing import Any

import click

from kvbatch.commands.common import guarded, print_json, say
from kvbatch.errors import InputError
from kvbatch.progress.streams import outlets
from kvbatch.text import all_escaped, escaped


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
    return _exit_code(found["problems"])


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def report(run_path: Path, as_json: bool) -> int:
    """Print the summary of RUN and write its page: runs/<job> for the latest run, or runs/<job>/<run id>."""
    from kvbatch.report.html.page import write_page
    from kvbatch.report.summary import load_summary
    from kvbatch.report.summary_text import render
    from kvbatch.run_dir.find_runs import open_run

    summary = load_summary(run_path, deep=True)
    if as_json:
        print_json(summary)
        return _exit_code(summary["problems"])
    try:
        if not summary["problems"]:  # a page that lacks rows is worse than that of yesterday
            summary["page"] = str(write_page(open_run(run_path)))
    finally:  # the summary is printed even if the run's directory cannot be written
        print(render(all_escaped(summary)))
    return _exit_code(summary["problems"])


@click.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Show every answer that differs, and show it whole.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@guarded
def diff(run_a: Path, run_b: Path, full: bool, as_json: bool) -> int:
    """Compare RUN_A and RUN_B row by row: memory, speed, quality, and the answers that differ."""
    from kvbatch.report.diff import compare, render_diff
    from kvbatch.run_dir.find_runs import open_run

    found = compare(open_run(run_a), open_run(run_b), full=full)
    if as_json:
        print_json(found)
    else:
        print(render_diff(all_escaped(found)))
    return 0


def _column_names(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if "" in names or len(set(names)) < len(names):
        raise click.BadParameter("an empty name, or a name that occurs twice")
    return names


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
@click.option("--bom", is_flag=True, help="CSV: begin with a byte-order mark, for spreadsheets.")
@click.option(
    "--columns",
    metavar="NAMES",
    default="",
    callback=_column_names,
    help="JSONL and CSV: write these columns in this order, joined by commas: id,title,output.",
)
@click.option("--new", "only_new", is_flag=True, help="Leave out the rows that RUN reused from earlier runs.")
@guarded
def export(run_path: Path, format_: str, output: Path | None, **options: Any) -> int:
    """Write the rows of RUN in another format, to stdout or a file."""
    from kvbatch.atomic_file import atomic_file
    from kvbatch.report.export import ExportOptions, export_rows, exported_columns
    from kvbatch.report.status import missing_rows
    from kvbatch.run_dir.find_runs import open_run

    chosen = ExportOptions(**options)
    if chosen.bom and format_ != "csv":
        raise click.UsageError("--bom is for --format csv")
    if chosen.columns and format_ == "openai-batch":
        raise click.UsageError("--columns is for --format jsonl and csv")
    run = open_run(run_path)
    if note := missing_rows(run):
        say(note)
    known = exported_columns(run)
    if unknown := [name for name in chosen.columns if known and name not in known]:
        raise click.UsageError(
            f"--columns: the output has no column {escaped(', '.join(unknown))}; it has {escaped(', '.join(known))}"
            " (input.passthrough copies more columns of the input)"
        )
    if output:
        with atomic_file(output) as stream:
            export_rows(run, format_, stream, chosen)
    else:
        with outlets() as out, out.raising():
            export_rows(run, format_, out.data, chosen)
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


def _exit_code(problems: list[str]) -> int:
    """Say on stderr what is wrong with a run; return the exit code."""
    for problem in problems:
        say(problem)
    return InputError.exit_code if problems else 0
