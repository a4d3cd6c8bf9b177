"""Which rows of earlier runs need not be done again: the choice of the incremental mode and of `kvbatch retry`.

The plan of the new run says of each reused row where an earlier run wrote it, so that a run that is continued copies
the same. How they are found and copied is the business of `kvbatch.run_dir.previous_rows`.

Imports neither torch nor transformers: whether something is new must be known at once.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbatch.corpus import Corpus
from kvbatch.corpus.fields import FieldTypes
from kvbatch.errors import InputError, JobChanged
from kvbatch.job_file.sections import Job
from kvbatch.model.precision import NAMES, KeptPrecision, Precision
from kvbatch.model.source import is_same_model
from kvbatch.run_dir.describe import describe_files, describe_run
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import is_same_job, job_runs, may_now_fit
from kvbatch.run_dir.fingerprint import RENDERED, changes, job_fingerprint
from kvbatch.run_dir.manifest import Manifest
from kvbatch.run_dir.row_hash import row_line

if TYPE_CHECKING:
    from engine.promise import FittedPolicy

_MODEL = ("model content", "tokenizer")  # keys that a run's fingerprint has once the model is open


@dataclass(frozen=True)
class Reuse:
    """Choose rows of earlier runs.

    Args:
        runs: their directories, newest first.
        redo: finish reasons of the rows that are not reused; `error` is that of rows without an answer.
        same_input: the input must hold the rows of the run, all and no others.
    """

    runs: tuple[str, ...] = ()
    redo: tuple[str, ...] = ("error",)
    same_input: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return what a manifest keeps."""
        return asdict(self)

    @classmethod
    def of(cls, run: RunDirectory) -> "Reuse":
        """Return the choice that a run's manifest keeps; raises as `RunDirectory.read_manifest`."""
        values = run.read_manifest().reuse
        return cls(tuple(values["runs"]), tuple(values["redo"]), values["same_input"]) if values else cls()

    @cached_property
    def directories(self) -> tuple[RunDirectory, ...]:
        """The runs."""
        return tuple(RunDirectory(Path(run)) for run in self.runs)


def find_run_of_same_rows(job: Job, corpus: Corpus) -> RunDirectory | None:
    """Return the job's last successful run if the input holds the rows that it did, in the same order.

    Only files of another size or time than that run saw are read.

    Raises:
        InputError: One of them cannot be read.
    """
    wanted = describe_run(job, corpus.files)
    for run, manifest in _runs(job):
        if run.is_success:
            same = is_same_job(manifest, wanted)
            same = same and is_same_model(manifest.model_files, manifest.revision, job.model.path)
            if same and not may_now_fit(run, manifest, job) and _has_same_rows(manifest, job, corpus):
                return run
            return None
    return None


def last_answers(job: Job) -> RunDirectory | None:
    """Return the run that an incremental job builds upon: its last success, else the newest there is."""
    runs = [run for run, _ in _runs(job)]
    return next((run for run in runs if run.is_success), runs[0] if runs else None)


def reused_by_default(job: Job, semantic: Mapping[str, Any]) -> Reuse | None:
    """Return the choice of an incremental job: what its last success answered, and runs after it that did not end.

    Args:
        semantic: what decides the job's output; what it says of the input decides no answer.
    """
    found: list[str] = []
    for run, manifest in _runs(job):
        if _answers(manifest.semantic) != _answers(semantic):
            continue
        try:
            if manifest.plan:
                run.check_file(run.plan)
        except InputError as error:
            logging.getLogger(__name__).warning("warning: no row of %s is reused: %s", run.path, error)
            continue
        found.append(str(run.path))
        if run.is_success:
            break
    return Reuse(tuple(found)) if found else None


def time_of_last(job: Job, semantic: Mapping[str, Any]) -> datetime | None:
    """Return the time of the prompts of the last run whose answers an incremental job may take, but for the time."""
    wanted = _answers(semantic) | {RENDERED: None}
    for _, manifest in _runs(job):
        if _answers(manifest.semantic) | {RENDERED: None} == wanted:
            return manifest.time
    return None


def check_model(reuse: Reuse, semantic: Mapping[str, Any]) -> None:
    """Prove that the rows of earlier runs may stand beside those of a model.

    Raises:
        JobChanged: Another one made them.
    """
    for run in reuse.directories:
        before = run.read_manifest().semantic
        lines = changes({key: before.get(key) for key in _MODEL}, {key: semantic.get(key) for key in _MODEL})
        if lines:
            raise JobChanged(
                f"the model changed since {run.path}; run the job anew:", *(f"  {line}" for line in lines)
            )


def _runs(job: Job) -> Iterator[tuple[RunDirectory, Manifest]]:
    """Yield the job's runs, the newest first, with their manifests."""
    for run in job_runs(Path(job.output_dir)):
        try:
            yield run, run.read_manifest()
        except InputError as error:
            logging.getLogger(__name__).warning("warning: nothing is taken from it: %s", error)


def _has_same_rows(manifest: Manifest, job: Job, corpus: Corpus) -> bool:
    before = {file["path"]: file for file in manifest.input_files}
    now = describe_files(corpus.files)
    if [*before] != [file["path"] for file in now]:
        return False
    changed = [file for file, facts in zip(corpus.files, now, strict=True) if before[file.path] != facts]
    if changed and job.input.limit is not None:  # which rows of a file count depends on the files before it
        return False
    corpus.check()
    for file in changed:
        digest = hashlib.sha256()
        for document in corpus.read(file, FieldTypes()):
            digest.update(row_line(document))
        if digest.hexdigest() != manifest.text_sha256.get(file.path, hashlib.sha256().hexdigest()):
            return False
    return True


def _answers(semantic: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in semantic.items() if not key.startswith("input.")}


def run_to_keep(
    job: Job, earlier: RunDirectory | None, reuse: Reuse | None, *, new_run: bool
) -> RunDirectory | None:
    """Return the run that is continued, or whose rows are reused: precision and cache policy stay what they were."""
    if earlier or new_run:
        return earlier
    if reuse:
        return reuse.directories[0] if reuse.runs else None
    return last_answers(job) if job.input.incremental else None


def kept_precision(run: RunDirectory) -> KeptPrecision | None:
    """Return what a run computes in, if its manifest can be read and says so."""
    try:
        manifest = run.read_manifest()
    except InputError:
        return None
    if manifest.model is None or manifest.device is None or manifest.model.dtype not in NAMES:
        return None
    precision = Precision(manifest.model.dtype, f"as in {run.run_id}", manifest.precision.get("gflops"))
    return KeptPrecision(manifest.device, precision)


def kept_policy(run: RunDirectory, job: Job, model: str) -> "FittedPolicy | None":
    """Return the cache policy of a run of the same cache keys and model, if its manifest can be read and says so.

    Args:
        model: identity of the model's content.
    """
    try:
        manifest = run.read_manifest()
    except InputError:
        return None
    asked = job_fingerprint(job).semantic
    keys = [key for key in {*asked, *manifest.semantic} if key.startswith("cache.")]
    is_same = all(asked.get(key) == manifest.semantic.get(key) for key in keys)
    return manifest.fitted if is_same and manifest.revision == model else None
