"""A textfile for Prometheus' node exporter: what the last run of a job did.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/. The file is replaced whole, so that the exporter
never reads half of one.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbatch.atomic_file import write_text

_SUCCESS = "kvbatch_last_success_timestamp_seconds"
# name, help, and for each label the fact that is its value
_METRICS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("exit_code", "Exit code of the last run.", {"": "exit_code"}),
    ("duration_seconds", "Duration of the last run.", {"": "wall_s"}),
    (
        "rows",
        "Rows in the output, by status.",
        {'status="ok"': "ok", 'status="error"': "errors", 'status="rejected"': "rejected"},
    ),
    ("cut_answers", "Answers cut at their longest or for going round in circles.", {"": "cut"}),
    ("reused_rows", "Rows reused from an earlier run.", {"": "carried"}),
    ("truncated_rows", "Rows whose document was cut to fit.", {"": "truncated"}),
    (
        "tokens",
        "Tokens that the last run computed or reused.",
        {'kind="prompt"': "prompt_tokens", 'kind="completion"': "completion_tokens"},
    ),
    ("kv_peak_bytes", "Most bytes of KV cache held at once.", {"": "kv_peak_bytes_measured"}),
    ("kv_kept_ratio", "Bytes of KV cache kept, of those of a full one.", {"": "kv_kept_ratio"}),
)


def write_metrics(path: Path, facts: Mapping[str, Any]) -> None:
    """Write what a run's ending says; the time of the last success outlives runs without one.

    Raises:
        OutputError: The file cannot be written.
    """
    now = time.time()
    job = facts["job"]  # a job's name needs no escapes
    success = now if facts["exit_code"] == 0 else _last_success(path)
    lines = _metric("kvbatch_last_run_timestamp_seconds", "When the last run ended.", {"": now}, job)
    lines += _metric(_SUCCESS, "When a run last ended with exit code 0.", {"": success}, job)
    for name, text, values in _METRICS:
        found = {label: facts[fact] for label, fact in values.items()}
        lines += _metric(f"kvbatch_last_run_{name}", text, found, job)
    write_text(path, "\n".join(lines) + "\n")


def _metric(name: str, text: str, values: Mapping[str, float | None], job: str) -> list[str]:
    samples = [
        f'{name}{{job_name="{job}"{"," if label else ""}{label}}} {value}'
        for label, value in values.items()
        if value is not None
    ]
    return [f"# HELP {name} {text}", f"# TYPE {name} gauge", *samples] if samples else []


def _last_success(path: Path) -> float | None:
    try:
        found = re.search(rf"^{_SUCCESS}\{{.*\}} (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        return float(found[1]) if found else None
    except (OSError, ValueError):
        return None
