"""A job key is added in its section; from there it is read, checked, written back, documented and part of the run."""

from typing import Literal

import pytest
from pydantic import create_model

from kvbatch.errors import JobFileError
from kvbatch.job_file import load, reference
from kvbatch.job_file.load import load_job, to_yaml
from kvbatch.job_file.sections import GenerationSection, Job
from kvbatch.run_dir.fingerprint import job_fingerprint

JOB = """\
version: 1
name: toy
input: {path: a.jsonl}
model: {path: some/model}
prompt: {template: "{text}"}
"""


class ToyGeneration(GenerationSection):
    """The generation section with a key more."""

    mood: Literal["plain", "festive"] = "plain"
    """How an answer sounds."""


def test_a_key_of_a_section_is_a_key_everywhere(tmp_path, monkeypatch):
    toy = create_model("Toy", __base__=Job, generation=(ToyGeneration, ToyGeneration()))
    for module in (load, reference):
        monkeypatch.setattr(module, "Job", toy)
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "generation: {mood: festive}\n")
    job = load_job(path)
    assert job.generation.mood == "festive" and "mood: festive" in to_yaml(job)
    assert job_fingerprint(job).semantic["generation.mood"] == "festive"
    assert (
        "| `generation.mood` | `plain`, `festive` | `plain` | How an answer sounds. |" in reference.markdown()
    )
    assert "generation.mood  (plain, festive; default plain)\n    How an answer sounds." in reference.listing(
        80
    )
    properties = reference.json_schema()["$defs"]["ToyGeneration"]["properties"]
    assert properties["mood"]["enum"] == ["plain", "festive"]
    with pytest.raises(JobFileError, match=r"-s generation.mod=1: .*did you mean 'mood'"):
        load_job(path, ["generation.mod=1"])
