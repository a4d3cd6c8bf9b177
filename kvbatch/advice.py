"""How a run that did not come to its end goes on: which run took its place, and what to type."""

from typing import Any

from kvbatch.errors import InputError
from kvbatch.manifest import RunDirectory


def superseded_by(run: RunDirectory, manifest: dict[str, Any]) -> str | None:
    """Return the id of the job's latest run if it began after this one, which did not come to its end."""
    if run.end:
        return None
    latest = RunDirectory((run.path.parent / "latest").resolve())
    if latest.run_id == run.path.resolve().name:
        return None
    try:
        return latest.run_id if latest.read_manifest()["created"] >= manifest["created"] else None
    except (InputError, KeyError):
        return None


def run_command(manifest: dict[str, Any]) -> str:
    """Return the command that began a run; values given by -s are left out, since they may be secret."""
    keys = "".join(f" -s {key}=…" for key in manifest.get("overridden", ()))
    return f"kvbatch run {manifest.get('job_file') or 'JOB'}{keys}"


def continuation(run: RunDirectory, manifest: dict[str, Any]) -> str:
    """Return the command by which a stopped run goes on.

    The input of an incremental job is another one by the next start: its run begins anew and takes over what there is.
    """
    if manifest.get("operational", {}).get("input.incremental") or superseded_by(run, manifest):
        return run_command(manifest)
    return f"kvbatch resume {run.path}"
