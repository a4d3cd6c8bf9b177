"""`kvbatch status`: what a run is at, from its files alone; it may be running, on this machine or another."""

import json
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypedDict

from kvbatch.errors import InputError
from kvbatch.report.summary_text import status_counts
from kvbatch.run_dir.advice import continuation, superseded_by
from kvbatch.run_dir.commit import count_rows, num_committed_rows
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.lock import Holder, lock_holder
from kvbatch.run_dir.plan_file import PlanSummary
from kvbatch.run_dir.staging import find_draft, is_draft
from kvbatch.run_dir.verify import find_problems

# A class statement cannot have the key "continue".
Status = TypedDict(
    "Status",
    {
        "job": str,
        "run_id": str,
        "state": str,  # running | stopped | superseded | complete | over_limits
        "superseded_by": str | None,
        "locked": bool,
        "holder": str | None,  # command and process that hold the lock
        "phase": str | None,
        "heartbeat_age_s": float | None,
        "planned_rows": int | None,
        "done_rows": int,
        "rows": dict[str, int],  # finished rows by status
        "reused_rows": int,
        "progress_ratio": float | None,  # of the prompt tokens
        "eta_s": float | None,
        "continue": str | None,  # the command by which a stopped run goes on
        "run": str,
        "output": str,
        "problems": list[str],
    },
)


def load_status(path: Path) -> Status:
    """Return the state of the run that a path names.

    `eta_s` assumes that the remaining tokens take as long as those of this session did, and that the remaining answers
    are as long as the finished ones; it is None until a row has ended.

    Raises:
        InputError: There is no run.
    """
    run, holder = _found(path)
    manifest, beat = run.read_manifest(), _heartbeat(run)
    plan = manifest.plan
    later = superseded_by(run, manifest)
    state = _state(run, holder, later)
    if state == "running" and holder and beat.get("pid") != holder.pid:
        beat = {}  # of an earlier session
    rows, own = count_rows(run)
    planned = plan.prompt_tokens if plan else 0
    is_running = state == "running"
    return {
        "job": manifest.job,
        "run_id": run.run_id,
        "state": state,
        "superseded_by": later if state == "superseded" else None,
        "locked": holder is not None,
        "holder": str(holder) if holder else None,
        "phase": beat.get("phase") if is_running else None,
        "heartbeat_age_s": _age_s(beat),
        "planned_rows": manifest.num_rows,
        "done_rows": rows.total(),
        "rows": dict(rows),
        "reused_rows": plan.num_reused if plan else 0,
        "progress_ratio": min(1.0, own["prompt"] / planned) if planned else None,
        "eta_s": _eta_s(plan, own, beat) if is_running and plan else None,
        "continue": continuation(run, manifest) if state == "stopped" else None,
        "run": str(run.path),
        "output": str(run.shards),
        "problems": [str(problem) for problem in find_problems(run)],
    }


def render_status(s: Status) -> str:
    """Return a status as the lines that a terminal shows."""
    lines = [("job", f"{s['job']}, run {s['run_id']}, {s['state']}")]
    if s["state"] == "running":
        age = "no heartbeat yet" if s["heartbeat_age_s"] is None else f"{s['heartbeat_age_s']:,.0f} s ago"
        lines.append(("phase", f"{s['phase'] or 'opening'}, heartbeat {age}"))
    lines.append(("lock", f"held by {s['holder']}" if s["locked"] else "free"))
    counts = status_counts(s["rows"]["ok"], s["rows"]["error"], s["rows"]["rejected"])
    of = "" if s["planned_rows"] is None else f" of {s['planned_rows']:,}"
    reused = f"; {s['reused_rows']:,} reused" if s["reused_rows"] else ""
    lines.append(("rows", f"{s['done_rows']:,}{of}: {counts}{reused}"))
    if s["progress_ratio"] is not None:
        left = "" if s["eta_s"] is None else f", about {timedelta(seconds=round(s['eta_s']))} left"
        lines.append(("progress", f"{s['progress_ratio']:.1%} of the prompt tokens{left}"))
    if s["superseded_by"]:
        lines.append(("superseded", f"by run {s['superseded_by']}"))
    if s["continue"]:
        lines.append(("continue", s["continue"]))
    lines.append(("output", f"{s['output']}/part-*.parquet"))
    return "\n".join(f"{name:<12} {text}" for name, text in lines)


def _found(path: Path) -> tuple[RunDirectory, Holder | None]:
    """Return the run that a path names, one that is being planned before all others, and who holds its job."""
    draft = find_draft(path)
    holder = draft and lock_holder(draft.path.parents[1])
    if draft and holder and holder.command == "run":
        return draft, holder
    run = open_run(path)
    return run, lock_holder(run.path.parent)


def missing_rows(run: RunDirectory) -> str | None:
    """Say how many rows of an unfinished run are in committed shards; None if all rows are.

    Raises:
        InputError: No row is in a committed shard.
    """
    if run.end:
        return None
    manifest = run.read_manifest()
    num_rows, num_done = manifest.num_rows, num_committed_rows(run)
    if num_done == num_rows:
        return None
    later = superseded_by(run, manifest)
    state = _state(run, lock_holder(run.path.parent), later)
    remedy = {
        "running": f"it goes on, see kvbatch status {run.path}",
        "superseded": f"run {later} took its place",
        "stopped": f"{continuation(run, manifest)} goes on with it",
    }[state]
    of = "" if num_rows is None else f" of {num_rows:,}"
    if not num_done:
        raise InputError(f"{run.path} has no committed shard yet, and so none{of} rows; {remedy}")
    return f"{run.path} did not come to its end: {num_done:,}{of} rows are in its shards; {remedy}"


def _state(run: RunDirectory, holder: Holder | None, later: str | None) -> str:
    if run.end == "complete":
        return "complete"
    if holder and holder.command == "run" and (is_draft(run) or _is_latest(run)):
        return "running"
    return run.end or ("superseded" if later else "stopped")


def _is_latest(run: RunDirectory) -> bool:
    return (run.path.parent / "latest").resolve() == run.path.resolve()


def _heartbeat(run: RunDirectory) -> dict[str, Any]:
    """Return the heartbeat; nothing is decided by it, so one that cannot be read counts as absent."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        beat = json.loads(run.heartbeat.read_text(encoding="utf-8"))
        datetime.fromisoformat(beat["time"]).astimezone()
        numbers = all(isinstance(beat.get(name, 0), int | float) for name in ("pid", "tokens", "elapsed_s"))
        if numbers and isinstance(beat.get("phase"), str):
            return beat
    return {}


def _age_s(beat: dict[str, Any]) -> float | None:
    if "time" not in beat:
        return None
    return (datetime.now(UTC) - datetime.fromisoformat(beat["time"])).total_seconds()


def _eta_s(plan: PlanSummary, own: Counter[str], beat: dict[str, Any]) -> float | None:
    if beat.get("phase") != "running" or not beat.get("tokens") or not own["rows"]:
        return None
    left: float = plan.prompt_tokens - own["prompt"]
    left += (plan.num_running - own["rows"]) * own["completion"] / own["rows"]
    return left * beat["elapsed_s"] / beat["tokens"]
