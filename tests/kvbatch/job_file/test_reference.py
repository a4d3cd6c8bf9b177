"""What is told of a job file's keys is what its models say."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from kvbatch.errors import JobFileError
from kvbatch.job_file.load import load_job
from kvbatch.job_file.reference import json_schema, markdown

ROOT = Path(__file__).parents[3]


def test_the_documentation_has_every_key_as_the_models_tell_it():
    table = markdown()
    assert table in (ROOT / "docs" / "job_file.md").read_text(), "write it anew: kvbatch schema --markdown"
    keys = table.split("\n\n")[0].splitlines()[3:]
    meanings = [line.split(" | ")[-1].strip(" |") for line in keys]
    assert all(meanings) and len(meanings) > 50


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_json_schema_takes_our_jobs_and_names_a_mistake(path):
    schema = json_schema()
    job = yaml.safe_load(path.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(job, schema)
    jsonschema.validate({"extends": "other.yaml", "input": {"limit": 1}}, schema)
    for wrong in ({**job, "modle": {}}, {**job, "generation": {"top_p": 2}}, {"name": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


BASE = """\
version: 1
name: base
input: {path: [a.jsonl, b.jsonl], limit: 5}
model: {path: some/model}
prompt:
  template: "{text}"
generation:
  max_new_tokens: 9
  stop: [x, y]
"""


def test_a_job_says_only_what_differs(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "base.yaml").write_text(BASE)
    (tmp_path / "shared" / "middle.yaml").write_text("extends: base.yaml\ngeneration: {stop: [z]}\n")
    path = tmp_path / "mine.yaml"
    path.write_text("extends: shared/middle.yaml\nname: mine\ninput: {path: c.jsonl}\n")
    job = load_job(path, ["generation.top_k=3"])
    assert (job.name, job.input.path, job.input.limit) == ("mine", "c.jsonl", 5)
    assert (job.generation.max_new_tokens, job.generation.stop, job.generation.top_k) == (9, ("z",), 3)


@pytest.mark.parametrize(
    ("base", "mine", "message"),
    [
        (BASE.replace("9", "nine"), "name: mine\n", r"base\.yaml:8: key 'generation.max_new_tokens'"),
        (BASE, "name: mine\nmodel: {dtype: float7}\n", r"mine\.yaml:3: key 'model.dtype'"),
        (BASE.replace("model:", "modle:"), "name: mine\n", r"base\.yaml:4: unknown key 'modle'"),
        ("extends: mine.yaml\n", "", r"base\.yaml:1: .*circle: .*mine.*→.*base.*→.*mine"),
        (None, "", r"mine\.yaml:1: key 'extends': there is no job file .*base\.yaml"),
    ],
)
def test_a_mistake_is_named_where_it_stands(tmp_path, base, mine, message):
    if base is not None:
        (tmp_path / "base.yaml").write_text(base)
    path = tmp_path / "mine.yaml"
    path.write_text("extends: base.yaml\n" + mine)
    with pytest.raises(JobFileError, match=message):
        load_job(path)
