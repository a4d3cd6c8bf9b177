"""Answers of a given form: a random model would never write JSON, so what it writes is the grammar's doing."""

import json

import jsonschema
import polars as pl
import pytest

from kvbatch.config import load_job
from kvbatch.errors import JobFileError
from kvbatch.run import run_job

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "parties": {"type": "array", "items": {"enum": ["Ängström", 'b"c']}, "maxItems": 2},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
    },
    "required": ["title", "parties", "year"],
    "additionalProperties": False,
}
RECORDS = [{"id": f"r{n}", "text": f"{n} fox " * (1 + n * 7 % 13)} for n in range(12)]


def rows(path) -> pl.DataFrame:
    return pl.read_parquet(run_job(load_job(path)).run.shards / "*.parquet")


def generation(**keys):
    # the model's own end tokens pass: only the grammar ends these answers
    return {"max_new_tokens": 120, "temperature": 1.0, "ignore_eos": True, **keys}


def test_every_answer_is_json_of_the_schema(job_file, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    found = rows(job_file(RECORDS, generation=generation(json_schema="schema.json")))
    assert found["kvb_status"].to_list() == ["ok"] * 12
    assert set(found["kvb_finish_reason"]) == {"stop"}
    values = [json.loads(text) for text in found["output_json"]]
    for value in values:
        jsonschema.validate(value, SCHEMA)
    assert len({value["title"] for value in values}) > 6, "the model chooses within the form"


def test_an_answer_cut_off_says_so_and_is_no_json(job_file):
    found = rows(job_file(RECORDS, generation=generation(json_schema=SCHEMA, max_new_tokens=62)))
    cut = found.filter(pl.col("kvb_finish_reason") == "length")
    assert 0 < len(cut) < 12
    assert set(cut["kvb_status"]) == {"error"} and set(cut["kvb_error_code"]) == {"invalid_output"}
    assert cut["output_json"].null_count() == len(cut) and cut["output"].str.starts_with("{").all()
    whole = found.filter(pl.col("kvb_finish_reason") == "stop")
    assert set(whole["kvb_status"]) == {"ok"} and whole["output_json"].null_count() == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices(job_file, temperature):
    choices = ["no", "not sure", 'a "quoted" one', "ja\nnein", "ü"]
    found = rows(job_file(RECORDS, generation=generation(choices=choices, temperature=temperature)))
    assert set(found["output"]) <= set(choices) and set(found["kvb_status"]) == {"ok"}
    assert found["output_json"].null_count() == 12
    assert temperature == 0 or found["output"].n_unique() > 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"json_schema": {"type": "array", "uniqueItems": True}},
            "generation.json_schema: Unimplemented keys",
        ),
        ({"json_schema": {"type": "strin"}}, "no JSON schema"),
        ({"json_schema": {"type": "string", "pattern": "(a"}}, "no JSON schema"),
        ({"json_schema": "nowhere.json"}, "nowhere.json: No such file"),
        ({"choices": ["a", "a"]}, "each choice stands once"),
        ({"choices": ["a"], "json_schema": {}}, "exclude each other"),
        ({"choices": ["a"], "stop": ["\n"]}, "generation.stop would cut"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(job_file, keys, message):
    path = job_file(RECORDS[:1], generation=generation(**keys))
    with pytest.raises(JobFileError, match=message):
        run_job(load_job(path))
