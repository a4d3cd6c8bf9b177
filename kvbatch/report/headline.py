"""One sentence on a run for a reader who looks at nothing else: what came of it, what it took, what to do."""

from kvbatch.report.summary import Summary
from kvbatch.text import counted


def headline(s: Summary) -> str:
    """Return the sentence: rows answered, reused, failed and rejected, answers cut, time, and what is left to do."""
    total = s["planned_rows"] if s["planned_rows"] is not None else s["rows"]
    if not total:
        return f"The input has no rows; {_to_do(s)}."
    rows, verb = counted(total, "row"), "was" if s["ok"] == 1 else "were"
    answered = (
        f"All {rows}" if s["ok"] == total > 1 else f"{s['ok']:,} of {rows}" if s["ok"] else f"None of {rows}"
    )
    reused = f" ({s['carried']:,} carried over from earlier runs)" if s["carried"] else ""
    failed = s["errors"] + s["rejected"]
    text = f"{answered} {verb} answered{reused}, {f'{failed:,}' if failed else 'none'} failed"
    if s["answers"]:
        cut, verb = f"{s['cut']:,}" if s["cut"] else "none", "was" if s["cut"] == 1 else "were"
        text += f" and {cut} of {counted(s['answers'], 'answer')} {verb} cut short"
    time = f", in {duration(s['wall_s'])}" if s.get("wall_s") else ""
    return f"{text}{time}; {_to_do(s)}."


def commands(s: Summary) -> list[str]:
    """Return for each thing that is left to do how it is done."""
    lines = []
    if s.get("problems"):
        lines.append(f"Files of the run are damaged: kvbatch resume {s['run']} repairs it.")
    elif s["next_command"]:
        lines.append(f"The run did not come to its end: {s['next_command']}")
    if s["errors"]:
        lines.append(
            f"{counted(s['errors'], 'row')} failed, with the reasons in deadletter/ beside this page: "
            f"kvbatch retry {s['run']} --status error"
        )
    if s["rejected"]:
        rows = counted(s["rejected"], "row")
        lines.append(
            f"{rows} of the input could not be used, with the reasons in deadletter/ beside this page."
        )
    if s["advice"]:
        lines.append(f"{s['cut']:,} of {s['answers']:,} answers were cut {s['advice']}.")
    return lines


def duration(seconds: float) -> str:
    """Return a time as people read it, of two units at most."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def _to_do(s: Summary) -> str:
    tasks = []
    if s.get("problems"):
        tasks.append("repair the damaged files of the run")
    elif s["next_command"]:
        tasks.append("continue the run")
    if s["errors"]:
        tasks.append("look at the errors and retry these rows")
    if s["rejected"]:
        tasks.append("correct the rejected rows of the input")
    if s["advice"]:
        tasks.append("run the cut answers again")
    if not tasks:
        return "nothing is left to do"
    return "to do: " + " and ".join([", ".join(tasks[:-1]), tasks[-1]] if len(tasks) > 1 else tasks)
