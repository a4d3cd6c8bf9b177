"""Every policy for documents around the limit: what is asked, what is counted, and that rows come out whole."""

import io
import shutil
from pathlib import Path

import polars as pl
import pytest

from kvbatch.errors import JobFileError
from kvbatch.job_file.load import load_job
from kvbatch.prompts.long_document import LongDocuments, group_answers
from kvbatch.prompts.rendering import PromptBuilder
from kvbatch.report.summary import load_summary
from kvbatch.report.summary_text import render
from kvbatch.run.entry import run_job
from kvbatch.run.row_requests import RequestKey
from tests.engine.models.tiny_models import save_tiny_model
from tests.kvbatch.fakes import Backwards, name

CONTEXT = 512
TEMPLATE = "Summarise the document below.\n{text}\nSummary:"
# digits are a token each in the tests' vocabulary
LINES = "".join(f"{n % 10}" * 19 + "\n" for n in range(400))


def makers(job_file, tokenizer, *overrides) -> LongDocuments:
    job = load_job(job_file([]), overrides)
    return LongDocuments(PromptBuilder(tokenizer, job.prompt), job, CONTEXT - job.generation.max_new_tokens)


def run(path, *overrides, **kwargs) -> tuple[pl.DataFrame, pl.DataFrame, Path]:
    found = run_job(load_job(path, overrides), stream=io.StringIO(), **kwargs).run
    rows = pl.concat([pl.read_parquet(part) for part in sorted(found.shards.glob("*.parquet"))])
    return rows, pl.read_parquet(found.path / "plan.parquet"), found.path


@pytest.fixture
def around(job_file, tokenizer):
    """Documents just under, at, just over and far over what the context leaves to one."""
    room = makers(job_file, tokenizer)._builder.num_static_tokens
    room = CONTEXT - 8 - room
    sizes = {"under": room - 1, "at": room, "over": room + 1, "far": 7 * room}
    return [{"id": name, "text": LINES[:size]} for name, size in sizes.items()]


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_error_and_truncate(job_file, around, side):
    path = job_file(around)
    rows, plan, _ = run(path)
    assert rows["kvb_status"].to_list() == ["ok", "ok", "error", "error"]
    assert rows["kvb_outcome"].to_list() == ["fits", "fits", "too_long", "too_long"]
    rows, plan, _ = run(path, "long_document.on_too_long=truncate", f"long_document.truncation_side={side}")
    assert rows["kvb_status"].to_list() == ["ok"] * 4
    assert (
        rows["kvb_outcome"].to_list()
        == plan["outcome"].to_list()
        == ["fits", "fits", "truncated", "truncated"]
    )
    assert rows["kvb_dropped_tokens"].to_list()[:3] == [0, 0, 1]
    assert rows["kvb_prompt_tokens"].to_list() == [CONTEXT - 8 - 1] + [CONTEXT - 8] * 3
    assert rows["kvb_truncation_side"].to_list() == [None, None, side, side]


def test_split_by_the_real_engine(job_file, around):
    path = job_file(around, long_document={"on_too_long": "split", "keep_parts": True})
    rows, plan, directory = run(path, "engine.memory_budget=4MiB")
    assert rows["kvb_status"].to_list() == ["ok"] * 4
    assert rows["kvb_outcome"].to_list() == ["fits", "fits", "split", "split"]
    assert rows["kvb_n_parts"].to_list() == plan["parts"].to_list()
    assert rows["kvb_n_parts"].to_list()[:3] == [1, 1, 2] and rows["kvb_n_parts"][3] in (7, 8)
    assert rows["kvb_n_levels"].to_list() == [None, None, 1, 1]
    assert rows["kvb_dropped_tokens"].to_list() == [0] * 4
    parts = rows["kvb_parts"].to_list()
    assert parts[:2] == [None, None] and [part["part"] for part in parts[3]] == list(range(len(parts[3])))
    assert all(part["output"] and part["question"] is None for part in parts[3])
    # the plan counts the parts, the row also the last prompt over their answers
    assert (rows["kvb_prompt_tokens"] > plan["prompt_tokens"]).to_list() == [False, False, True, True]
    summary = load_summary(directory)
    assert summary["prompt_tokens"] == rows["kvb_prompt_tokens"].sum()
    assert f"split        2 rows into {rows['kvb_n_parts'][2:].sum()} parts" in render(summary)
    assert summary["kv_peak_bytes_measured"] == summary["kv_peak_bytes_predicted"]
    once = run(path, "output.dir=other", "engine.max_sequences=1")[0]
    assert once["output"].to_list() == rows["output"].to_list(), "packing does not change the output"


class Recorder(Backwards):
    """Also keep what was asked by the request's id."""

    def asked(self, tokenizer) -> dict[RequestKey, str]:
        return {r.request_id: tokenizer.decode(r.prompt_token_ids) for r in self.requests}


def test_parts_and_levels(job_file, tokenizer):
    path = job_file(
        [{"id": "a", "text": LINES[:2000]}, {"id": "b", "text": "short"}],
        long_document={
            "on_too_long": "split",
            "part_tokens": 200,
            "overlap_tokens": 20,
            "boundary": "line",
            "part_prompt": "Part {part} of {num_parts}: {text} Answer.",
            "reduce_prompt": "Together of {id}: {text} Answer.",
        },
        generation={"max_new_tokens": 60},
    )
    engine = Recorder()
    rows, plan, _ = run(path, make_llm=lambda model, config: engine)
    asked = engine.asked(tokenizer)
    num_parts = plan["parts"][0]
    assert num_parts == rows["kvb_n_parts"][0] == 11 and rows["kvb_n_parts"][1] == 1
    texts = []
    for part in range(num_parts):
        head, text = asked[RequestKey(0, 0, part)].split(f"Part {part + 1} of {num_parts}: ")
        texts.append(text.split(" Answer.")[0])
    lines = LINES[:2000].splitlines()
    for before, after in zip(texts, texts[1:], strict=False):
        assert before.endswith("\n") and after.startswith(before.splitlines()[-1] + "\n"), (
            "a line is repeated"
        )
    joined = texts[0] + "".join(text.split("\n", 1)[1] for text in texts[1:])
    assert joined.splitlines() == lines
    # answers of up to 60 tokens, 3 of them in a prompt over 200: by length, as they are shorter
    reduces = {key: text for key, text in asked.items() if "Together" in text}
    final = max(reduces)
    assert rows["output"].to_list() == [f"answer {name(final)}", "answer 1"]
    assert rows["kvb_n_levels"].to_list() == [final.level, None]
    first_level = "".join(text for key, text in sorted(reduces.items()) if key.level == 1)
    parts = [name(RequestKey(0, 0, part)) for part in range(num_parts)]
    assert [f"answer {part}" in first_level for part in parts] == [True] * num_parts
    assert "Together of a: answer 0\n\nanswer 0010\n\n" in first_level
    assert len({request.sampling.seed for request in engine.requests}) == len(engine.requests)
    assert rows["kvb_parts"].to_list() == [None, None], "not kept unless asked for"
    assert rows["kvb_prompt_tokens"][0] == sum(
        len(request.prompt_token_ids) for request in engine.requests if request.request_id.row == 0
    )


def test_a_column_that_parts_need_is_missed_by_name(job_file):
    path = job_file(
        [{"id": "a", "text": LINES[:1300], "title": "x"}, {"id": "b", "text": LINES[:1300]}],
        input={"passthrough": ["title"]},
        long_document={"on_too_long": "split", "reduce_prompt": "{text} Of {title}?"},
    )
    rows = run(path, make_llm=lambda model, config: Recorder())[0]
    assert rows["kvb_error_code"].to_list() == [None, "missing_column"]


def test_groups_are_as_long_as_the_room():
    pieces = [[0] * n for n in (4, 4, 4, 9, 1, 1, 10)]
    assert [len(group) for group in group_answers(pieces, 1, 14)] == [3, 3, 1]
    assert sum(group_answers(pieces, 1, 14), []) == pieces


def test_a_part_that_fails_fails_the_row_with_its_name(job_file):
    path = job_file(
        [{"id": "a", "text": LINES[:1300]}], long_document={"on_too_long": "split"}, limits={"row_retries": 0}
    )
    engine = Backwards(fail=("0010",))
    with pytest.raises(Exception, match="none of 1 rows"):
        run(path, make_llm=lambda model, config: engine)
    rows = pl.read_parquet("runs/test/latest/shards/*.parquet")
    assert rows["kvb_error_message"].to_list() == ["part 2 of 3: it broke"]
    assert rows["output"].to_list() == [None] and len(engine.requests) == 3, (
        "nothing is made of what is missing"
    )


class Interrupted(Recorder):
    """Stop after so many answers."""

    def generate(self, requests):
        for number, result in enumerate(super().generate(requests)):
            if number == 5:
                raise KeyboardInterrupt
            yield result


def test_a_row_is_finished_when_its_last_answer_is(job_file):
    path = job_file(
        [{"id": "short", "text": "x"}, {"id": "a", "text": LINES[:1300]}, {"id": "b", "text": LINES[:900]}],
        long_document={"on_too_long": "split"},
    )
    whole = Recorder(num_held=1)
    rows = run(path, "output.dir=whole", make_llm=lambda model, config: whole)[0]
    first, second = Interrupted(num_held=1), Recorder(num_held=1)
    with pytest.raises(KeyboardInterrupt):
        run(path, make_llm=lambda model, config: first)
    began = {RequestKey(0), RequestKey(1), RequestKey(1, 0, 1)}
    assert {request.request_id for request in first.requests} >= began, "a row and some parts ran"
    again = run(path, make_llm=lambda model, config: second)[0]
    assert again["output"].to_list() == rows["output"].to_list()
    done = {request.request_id for request in whole.requests} - {
        request.request_id for request in second.requests
    }
    assert {key.row for key in done} == {0, 1} and done == {
        r.request_id for r in first.requests if r.request_id.row < 2
    }


def test_a_split_row_that_cannot_fit_is_refused_with_its_numbers(job_file):
    path = job_file(
        [{"id": "a", "text": LINES[:1300]}, {"id": "b", "text": "x"}], long_document={"on_too_long": "split"}
    )
    rows, plan, _ = run(path, "engine.memory_budget=100KB")
    assert rows["kvb_error_code"].to_list() == ["over_budget", None]
    assert "prompt tokens and up to 8 new ones need" in rows["kvb_error_message"][0]
    rows, plan, _ = run(path, "engine.memory_budget=100KB", "long_document.part_tokens=60")
    assert rows["kvb_status"].to_list() == ["ok", "ok"]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        (["long_document.overlap_tokens=300"], "long_document.overlap_tokens 300"),
        (["generation.max_new_tokens=200"], "two partial answers take up to"),
    ],
)
def test_parts_that_cannot_be_are_said_before_a_run_begins(job_file, overrides, match):
    with pytest.raises(JobFileError, match=match):
        run(job_file([]), "long_document.on_too_long=split", *overrides)
    assert not list(Path("runs/test").glob("*/"))


def test_stream(job_file, around, tmp_path, tiny_model):
    save_tiny_model(tmp_path / "model", "llama", vocab_size=320, max_position_embeddings=CONTEXT)
    for file in (*tiny_model.glob("*token*.j*"), *tiny_model.glob("chat*")):
        shutil.copy(file, tmp_path / "model")
    small = {"chunk_size": 32, "delay": 1, "recent_tokens": 32, "tail_tokens": 32, "warmup_tokens": 4}
    path = job_file(
        around,
        model={"path": "model"},
        long_document={"on_too_long": "stream"},
        cache={"preset": "logs", "budget": "uniform"} | small,
    )
    rows, plan, directory = run(path)
    assert rows["kvb_status"].to_list() == ["ok"] * 4
    assert rows["kvb_outcome"].to_list() == ["fits", "fits", "streamed", "streamed"]
    assert rows["kvb_prompt_tokens"].to_list() == plan["prompt_tokens"].to_list()
    assert rows["kvb_prompt_tokens"][3] > 6 * CONTEXT and rows["kvb_dropped_tokens"].to_list() == [0] * 4
    assert plan["predicted_kv_bytes"][3] < 1.5 * plan["predicted_kv_bytes"][1]
    assert (rows["kvb_kv_peak_bytes"] <= plan["predicted_kv_bytes"]).all()
    summary = load_summary(directory)
    assert "streamed     2 rows" in render(summary)
    assert summary["kv_peak_bytes_measured"] == pytest.approx(summary["kv_peak_bytes_predicted"], rel=0.1)
    assert summary["kv_peak_bytes_measured"] < summary["kv_pool_bytes"]


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({}, "set cache.preset"),
        (
            {
                "cache": {"preset": "logs"},
                "prompt": {"template": "{text} {question}", "questions": ["a", "b"]},
            },
            "ask one",
        ),
    ],
)
def test_what_cannot_stream_is_refused(job_file, sections, match):
    with pytest.raises(JobFileError, match=match):
        load_job(job_file([], long_document={"on_too_long": "stream"}, **sections))


def test_a_context_too_short_to_stream_is_said_before_weights_load(job_file, tokenizer):
    with pytest.raises(JobFileError, match="the newest 2,112 tokens are held whole, of 504"):
        makers(job_file, tokenizer, "long_document.on_too_long=stream", "cache.preset=logs")


QUESTIONS = ["What is it?", "Who wrote it at all?", "When?"]
ASKING = {"template": "Read this.\n{text}\nQuestion: {question}\nAnswer:", "questions": QUESTIONS}


def test_several_questions_read_a_document_once(job_file):
    records = [{"id": n, "text": LINES[: 40 + 30 * n]} for n in range(5)]
    path = job_file(records, prompt=ASKING)
    rows, plan, directory = run(path, "engine.memory_budget=4MiB")
    answers = rows["kvb_answers"].to_list()
    assert [[answer["question"] for answer in row] for row in answers] == [QUESTIONS] * 5
    assert all(
        answer["status"] == "ok" and answer["finish_reason"] == "length" for row in answers for answer in row
    )
    assert rows["output"].to_list() == [None] * 5 and rows["kvb_n_parts"].to_list() == [1] * 5
    assert plan["prompt_tokens"].to_list() == rows["kvb_prompt_tokens"].to_list()
    summary = load_summary(directory)
    assert summary["kv_peak_bytes_measured"] == summary["kv_peak_bytes_predicted"]
    # each answer is what the question alone would get
    for number, question in enumerate(QUESTIONS):
        single = {"template": ASKING["template"].replace("{question}", question), "questions": []}
        alone = run(job_file(records, prompt=single), "output.dir=alone")[0]
        assert alone["output"].to_list() == [row[number]["output"] for row in answers]
    # what was computed: the document once, then its questions
    read = rows["kvb_prompt_tokens"] - rows["kvb_cached_prompt_tokens"]
    assert (read < rows["kvb_prompt_tokens"] / 2).all()


def test_questions_of_a_split_document(job_file, tokenizer):
    path = job_file(
        [{"id": "a", "text": LINES[:1000]}],
        prompt=ASKING,
        long_document={"on_too_long": "split", "keep_parts": True},
        limits={"row_retries": 0},
    )
    engine = Recorder(fail=("0011",))  # the second question of the second part
    with pytest.raises(Exception, match="none of 1 rows"):
        run(path, make_llm=lambda model, config: engine)
    [row] = pl.read_parquet("runs/test/latest/shards/*.parquet").to_dicts()
    answers = row["kvb_answers"]
    assert [answer["status"] for answer in answers] == ["ok", "error", "ok"]
    assert answers[1]["error_message"] == "part 2 of 3: it broke" and answers[1]["output"] is None
    asked = engine.asked(tokenizer)
    first, last = RequestKey(0, 1, 0, 0), RequestKey(0, 1, 0, 2)
    assert asked[first].endswith("Answer:<|im_end|>\n<|im_start|>assistant\n")
    assert "answer 0\n\nanswer 00\n\nanswer 00" in asked[first], "cut to the room that answers have"
    assert QUESTIONS[0] in asked[first] and QUESTIONS[2] in asked[last]
    assert [answers[0]["output"], answers[2]["output"]] == [f"answer {name(key)}" for key in (first, last)]
    assert [(part["part"], part["question"]) for part in row["kvb_parts"]] == [
        (p, q) for p in range(3) for q in range(3)
    ]
    shared = [request for request in engine.requests if not request.request_id.level]
    assert all(request.prefix_tokens and not request.probe_token_ids for request in shared)
    assert len({request.prefix for request in shared}) == 3, "each part is read once"


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ({"template": "{question} {text}", "questions": ["a"]}, "after {text}"),
        ({"template": "{text}", "questions": ["a"]}, "must stand once"),
        (
            {"template": "{text} {question}", "system": "{question}", "questions": ["a"]},
            "not in prompt.system",
        ),
    ],
)
def test_questions_that_cannot_share_a_document_are_refused(job_file, prompt, match):
    with pytest.raises(JobFileError, match=match):
        load_job(job_file([], prompt=prompt))
