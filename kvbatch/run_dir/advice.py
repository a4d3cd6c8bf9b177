"""What to type next: after a run that did not come to its end, and for answers that did not."""

from collections.abc import Mapping
from typing import Any

from kvbatch.errors import InputError
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import latest_run
from kvbatch.run_dir.manifest import Manifest

_MORE = 4  # times as many tokens are proposed for answers that were cut


def superseded_by(run: RunDirectory, manifest: Manifest) -> str | None:
    """Return the id of the job's latest run if it began after this one, which did not come to its end."""
    if run.end:
        return None
    latest = latest_run(run.path.parent)
    if latest is None or latest.run_id == run.run_id:
        return None
    try:
        return latest.run_id if _age(latest.read_manifest()) >= _age(manifest) else None
    except InputError:
        return None


def _age(manifest: Manifest) -> tuple[int, str]:
    return manifest.number, manifest.created


def run_command(manifest: Manifest) -> str:
    """Return the command that began a run; values given by -s are left out, since they may be secret."""
    keys = "".join(f" -s {key}=…" for key in manifest.overridden)
    return f"kvbatch run {manifest.job_file or 'JOB'}{keys}"


def continuation(run: RunDirectory, manifest: Manifest) -> str:
    """Return the command that continues a stopped run.

    The input of an incremental job is another one by the next start: its run begins anew and takes over what there is.
    """
    if manifest.operational.get("input.incremental") or superseded_by(run, manifest):
        return run_command(manifest)
    return f"kvbatch resume {run.path}"


def cut_advice(run: RunDirectory, manifest: Manifest, figures: Mapping[str, Any]) -> str | None:
    """Return the remedy for answers that were cut; None if there are none."""
    reasons = figures["finish_reasons"]
    parts = []
    if reasons.get("length"):
        semantic = manifest.semantic
        most = semantic.get("generation.max_new_tokens", 256)
        context = manifest.model.max_context if manifest.model else 0
        room = context - figures["cut_prompt_tokens"]
        if semantic.get("input.format") == "openai-batch":
            parts.append("by length: raise generation.max_new_tokens, or max_tokens of the rows that set it")
        elif not isinstance(most, int):  # a variable of the environment gave it
            parts.append("by length: raise generation.max_new_tokens")
        elif room <= most:
            parts.append(f"at {most:,} tokens, and the model's context holds no more: shorten the prompts")
        else:
            parts.append(
                f"at {most:,} tokens: kvbatch retry {run.path} --status length --max-new-tokens "
                f"{min(_MORE * most, room)}, or raise generation.max_new_tokens"
            )
    if reasons.get("repetition"):
        parts.append("going round in circles: another prompt, model or generation.temperature may end that")
    return "; ".join(parts) or None
