"""Answers of a given form: a random model would never write JSON, so what it writes is the grammar's doing."""

import io
import json
from pathlib import Path

import jsonschema
import polars as pl
import pytest

from kvbatch.errors import JobFileError
from kvbatch.job_file.answer_schema import SchemaValidator, check_schema
from kvbatch.job_file.load import load_job
from kvbatch.job_file.sections import LongDocumentSection
from kvbatch.opened_job import opened_job
from kvbatch.run.entry import run_job
from tests.kvbatch.fakes import Backwards

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
        ({"json_schema": {"type": "string", "pattern": "^(?=a)"}}, "is not supported: look-around"),
        ({"json_schema": {"type": "number", "maximum": float("inf")}}, "no JSON schema"),
        ({"json_schema": "nowhere.json"}, "nowhere.json: No such file"),
        ({"json_schema": "fine.json"}, "fine.json is no schema: 0.99999999999999999999 has more digits"),
        ({"choices": ["a", "a"]}, "each choice stands once"),
        ({"choices": ["a"], "json_schema": {}}, "exclude each other"),
        ({"choices": ["a"], "stop": ["\n"]}, "generation.stop would cut"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(job_file, keys, message):
    path = job_file(RECORDS[:1], generation=generation(**keys))
    Path("fine.json").write_text('{"maximum": 0.5, "exclusiveMaximum": 0.99999999999999999999}')
    with pytest.raises(JobFileError, match=message):
        run_job(load_job(path))


CENTS = {"multipleOf": 0.01}
AGAIN = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "items": {"anyOf": [{"type": "number", **CENTS}, {"$ref": "#"}]},
    "type": "array",
}
NAMES = {"patternProperties": {r"^\p{Lu}$": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            CENTS,
            ["19.9", "4.02", "-0.30", "0e9", "1e400", "1E99999999999999999999"],
            ["0.001", "1E-999999999"],
        ),
        ({"multipleOf": 3}, ["9.0", "3e999999999"], ["1e999999999", "3.5"]),
        (
            {"minimum": 0, "exclusiveMaximum": 1},
            ["0.99999999999999999999", "1e-99999999999999999999"],
            ["1.0", "-1e-999999999", "1e999999999", "9" * 5000],
        ),
        ({"enum": [1, 2.5, {"a": 0.1}]}, ["1.0", "25e-1", '{"a": 0.10}'], ["true", "2.50000000000000000001"]),
        ({"type": "integer"}, ["1.0", "-7", "9" * 5000, "1e999999999"], ["1.5", "1e-999999999", "NaN"]),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer"}, ["9" * 5000], ["1.0"]),
        (AGAIN, ["[[19.9], 4.02]"], ["[[4.021]]"]),
        (
            {"type": "string", "pattern": r"^\p{Lu}\p{L}?$"},
            ['"Äß"', '"\\u00c4"'],
            ['"ä"', '"A\\n"', '"\\ud800"'],
        ),
        ({"pattern": r"(?<digit>\d)$"}, ['"no 7"', "7"], ['"7 no"', '"\u0667"']),
        (NAMES, ['{"Ä": 1}'], ['{"Ä": "x"}', '{"ä": 1}']),
        ({"items": {"$ref": "#"}}, ["[[]]"], ["[" * 900 + "]" * 900]),
    ],
)
def test_answers_are_validated_by_what_is_written(schema, right, wrong):
    check_schema(schema)
    validator = SchemaValidator(schema)
    assert {text[:40]: validator.problem(text) for text in right} == {text[:40]: None for text in right}
    assert all(validator.problem(text) for text in wrong)


def test_choices_stand_in_the_prompt(job_file, tokenizer):
    said, keys = io.StringIO(), {"choices": ["yes", "not sure"]}
    path = job_file(RECORDS, generation=keys, prompt={"template": "{text}\nIs it? Yes or no."})
    with opened_job(load_job(path), stream=said):
        assert "note: generation.choices: 'not sure' stands nowhere in the prompt" in said.getvalue()
    prompt = {
        "system": "Say {choices}.",
        "template": "{text}\nAsked: {question} Of {choices}:",
        "questions": ["Is it?", "Was it?"],
    }
    path, said = job_file(RECORDS, generation=keys, prompt=prompt), io.StringIO()
    with opened_job(load_job(path), stream=said) as (opened, _):
        assert "stand" not in said.getvalue()
        [prompt] = opened.prompts.build_batch([next(opened.corpus.documents())], 400, LongDocumentSection())
    texts = [tokenizer.decode(list(request.token_ids)) for request in prompt.requests]
    assert ["s it? Of yes, not sure:" in text and "Say yes, not sure." in text for text in texts] == [
        True
    ] * 2
    with pytest.raises(JobFileError, match="{question} must stand once, after"):
        load_job(path, ["generation.choices=[]", "input.passthrough=[choices]"])


def test_a_stop_string_that_is_a_control_token_is_one(job_file, tokenizer):
    engine = Backwards()
    end = tokenizer.convert_tokens_to_ids("<|im_start|>")
    path = job_file(RECORDS[:1], generation={"stop": ["<|im_start|>", "END"], "stop_token_ids": [7]})
    run_job(load_job(path), make_llm=lambda *_: engine)
    sampling = engine.requests[0].sampling
    assert sampling.stop_token_ids == (7, end) and sampling.stop == ("<|im_start|>", "END")
    for stop in ("<|im_end|>\n", "<|im_end|><|im_start|>"):
        path = job_file(RECORDS[:1], generation={"stop": [stop]})
        with pytest.raises(
            JobFileError, match=r"generation\.stop .* holds the control token .* write '<\|im_"
        ):
            run_job(load_job(path), make_llm=lambda *_: engine)
