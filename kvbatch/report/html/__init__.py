"""`report.html`, one run on one page that fetches nothing: figures, plots and markup."""

from pathlib import Path

from kvbatch.atomic_file import write_text
from kvbatch.report.summary import Summary, load_summary
from kvbatch.run_dir.directory import RunDirectory


def write_page(run: RunDirectory, summary: Summary | None = None) -> Path:
    """Write the page of a run, ended or not, and return its path.

    Args:
        summary: of a run that is about to end; else what `load_summary` says.

    Raises:
        InputError: It is no run directory.
        OutputError: The page cannot be written.
    """
    from kvbatch.report.html.figures import compute
    from kvbatch.report.html.markup import render_page

    page = render_page(
        summary or load_summary(run.path),
        compute(run),
        run.read_manifest(),
        run.job_file.read_text(encoding="utf-8", errors="replace") if run.job_file.is_file() else "",
    )
    write_text(run.page, page)
    return run.page
