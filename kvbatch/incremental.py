"""What a job with `input.incremental` may rely on: the last run that succeeded with the same answers in mind.

Imports neither torch nor transformers: whether something is new must be known at once.
"""

import hashlib
from pathlib import Path

from kvbatch.carry import EarlierRun, row_line
from kvbatch.corpus import Corpus
from kvbatch.corpus.fields import FieldTypes
from kvbatch.job import Job
from kvbatch.manifest import RunDirectory, describe_files, describe_run
from kvbatch.errors import InputError


def find_earlier(job: Job, corpus: Corpus) -> tuple[RunDirectory | None, EarlierRun | None]:
    """Return the run that did all of this already, or the one whose rows can be carried over.

    Raises:
        InputError: A file cannot be read, or the earlier run is damaged.
    """
    run = find_last_success(job)
    if run is None:
        return None, None
    if has_nothing_new(run, job, corpus):
        return run, None
    return None, EarlierRun(run)


def find_last_success(job: Job) -> RunDirectory | None:
    """Return the job's newest successful run by the same version, model and semantic keys, whatever its input was."""
    home = Path(job.output_dir)
    wanted = describe_run(job, ())
    finished = []
    for success in home.glob("*/_SUCCESS"):
        if not success.parent.is_symlink():
            finished.append((success.stat().st_mtime_ns, success.parent))
    for _, path in sorted(finished, reverse=True):
        run = RunDirectory(path)
        try:
            found = run.read_manifest()
        except InputError:
            continue
        if all(found.get(key) == wanted[key] for key in ("format", "kvbatch", "answer_hash", "model_files")):
            return run
    return None


def has_nothing_new(run: RunDirectory, job: Job, corpus: Corpus) -> bool:
    """Tell whether the input holds the rows of a run, no more and no fewer, in the same order.

    Only files of another size or time than that run saw are read.

    Raises:
        InputError: One of them cannot be read.
    """
    manifest = run.read_manifest()
    before = {file["path"]: file for file in manifest["input_files"]}
    now = describe_files(corpus.files)
    if manifest["config_hash"] != describe_run(job, ())["config_hash"] or [*before] != [
        f["path"] for f in now
    ]:
        return False
    changed = [file for file, facts in zip(corpus.files, now, strict=True) if before[file.path] != facts]
    if changed and job.input.limit is not None:  # which rows of a file count hangs on the files before it
        return False
    corpus.check()
    for file in changed:
        digest = hashlib.sha256()
        for document in corpus.read(file, FieldTypes()):
            digest.update(row_line(document))
        if digest.hexdigest() != manifest["text_sha256"].get(file.path, hashlib.sha256().hexdigest()):
            return False
    return True
