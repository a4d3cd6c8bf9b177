"""What a chat template is told: the run's own time, however late it goes on, and what the job tells it."""

import io
import shutil
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest
import yaml

from kvbatch.commands.validate import findings_of
from kvbatch.errors import JobChanged, JobFileError
from kvbatch.estimate.preview import plan_job
from kvbatch.job_file.load import load_job
from kvbatch.job_file.sections import PromptSection
from kvbatch.prompts.chat_template import ChatTemplate
from kvbatch.prompts.rendering import PromptBuilder
from kvbatch.run.entry import run_job
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.plan_file import read_plan
from kvbatch.run_dir.reuse import Reuse
from tests.kvbatch.fakes import Backwards
from tests.kvbatch.helpers import CHAT_TEMPLATE

FIRST, LATER = "2026-11-30T22:10:05+01:00", "2027-01-09T06:00:00+01:00"
DATED = "{{ 'Today is ' + strftime_now('%d %B %Y') }}\n"
RECORDS = [{"id": f"r{n}", "text": "fox"} for n in range(6)]


class Stopped(Backwards):
    """An engine that is stopped after some answers."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def generate(self, requests):
        for number, result in enumerate(super().generate(requests)):
            if number == self.after:
                raise KeyboardInterrupt
            yield result


@pytest.fixture
def at(monkeypatch):
    """Set the clock of this process."""
    return lambda time: monkeypatch.setattr("kvbatch.opened_job.now", lambda: datetime.fromisoformat(time))


@pytest.fixture
def write(job_file, tiny_model, tmp_path):
    """Write a job whose model's template begins as given."""

    def write(records=RECORDS, start=DATED, **sections):
        if not Path("model").exists():
            shutil.copytree(tiny_model, "model")
        Path("model/chat_template.jinja").write_text(start + CHAT_TEMPLATE)
        return job_file(records, model={"path": "model"}, **sections)

    return write


def run(path, *overrides, engine=None, **kwargs):
    """Run a job; return its run, the prompts that the engine got, and what was said."""
    engine, said = engine or Backwards(), io.StringIO()
    try:
        found = run_job(load_job(path, overrides), stream=said, make_llm=lambda *_: engine, **kwargs).run
    except KeyboardInterrupt:
        found = open_run(Path("runs/test"))
    return found, {tuple(request.prompt_token_ids) for request in engine.requests}, said.getvalue()


def date_of(prompts, tokenizer):
    [prompt] = prompts
    return tokenizer.decode(list(prompt)).partition("Today is ")[2].partition("\n")[0]


def test_a_run_has_one_date_whenever_it_goes_on(write, at, tokenizer):
    path = write()
    at(FIRST)
    first, prompts, _ = run(path, engine=Stopped(2))
    assert date_of(prompts, tokenizer) == "30 November 2026"
    at(LATER)
    again, later, said = run(path)
    assert again.path == first.path and again.is_success and later == prompts
    assert "2 of 6 rows are finished" in said
    assert again.read_manifest().prompt_time == FIRST
    # a new run has its own time, an old one that it does not continue has no say in it
    assert date_of(run(path, new_run=True)[1], tokenizer) == "09 January 2027"


def test_a_run_that_is_not_continued_leaves_no_date_behind(write, at, tokenizer):
    path = write()
    at(FIRST)
    run(path, engine=Stopped(0))
    at(LATER)
    assert date_of(run(path, "generation.seed=1")[1], tokenizer) == "09 January 2027"


def test_a_prompt_that_is_rendered_otherwise_is_refused_by_name(write, at, monkeypatch):
    path = write()
    at(FIRST)
    run(path, engine=Stopped(2))
    at(LATER)
    with monkeypatch.context() as patch:
        patch.setattr("kvbatch.run_dir.manifest.Manifest.time", None)
        with pytest.raises(JobChanged, match="rendered chat template: "):
            run(path)

    def longer(planned):
        for rows in read_plan(planned.path):
            yield [replace(row, prompt_tokens=row.prompt_tokens + 1) for row in rows]

    monkeypatch.setattr("kvbatch.run.shard_loop.planned_shards", longer)
    with pytest.raises(JobChanged, match="the prompt of row 'r.' has .* by the plan"):
        run(path)


@pytest.mark.parametrize(("start", "is_adopted"), [(DATED, False), ("{{ strftime_now('%H') * 0 }}", True)])
def test_a_plan_of_the_evening_before_holds_if_it_says_the_same(write, at, start, is_adopted):
    path = write(start=start)
    at(FIRST)
    plan_job(load_job(path))
    at(LATER)
    found, prompts, said = run(path)
    assert found.is_success and len(prompts) == 1
    assert ("has a plan already" in said) == is_adopted


def test_rows_that_are_reused_keep_their_date_and_new_ones_share_it(write, at, tokenizer):
    path = write(input={"incremental": True})
    at(FIRST)
    first, prompts, said = run(path)
    assert "writes the time" not in said
    at(LATER)
    write([*RECORDS, {"id": "new", "text": "fox"}], input={"incremental": True})
    engine = Backwards()
    _, later, said = run(path, engine=engine)
    assert len(engine.requests) == 1 and later == prompts
    assert "that of 2026-11-30" in said and "--new-run takes today's" in said
    engine = Backwards()
    assert date_of(run(path, engine=engine, new_run=True)[1], tokenizer) == "09 January 2027"
    assert len(engine.requests) == 7
    path = write(input={"incremental": True})
    reuse = Reuse((str(first.path),), redo=("stop",), same_input=True)  # as `retry` does
    assert run(path, reuse=reuse)[1] == prompts


def test_it_is_rendered_as_transformers_does(tokenizer):
    other = deepcopy(tokenizer)
    other.chat_template = (
        "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ bos_token }}"
        "{% for m in messages %}{{ strftime_now('%Y') }}{% break %}{% endfor %}{{ tools }}{{ depth }}"
    )
    messages = [{"role": "user", "content": "é"}]
    expected = other.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, depth=3)
    assert ChatTemplate(other, arguments={"depth": 3}).render(messages) == expected
    for source in ("{{ ['a', 'b'] | random }}", "{{ lipsum() }}"):
        other.chat_template = source
        with pytest.raises(JobFileError, match="draws at random"):
            PromptBuilder(other, PromptSection(template="{text}"))


SWITCH = "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"


def test_a_job_tells_its_chat_template(write):
    path = write(start=SWITCH)
    told = "generation.chat_template_kwargs={enable_thinking: false, thinkng: 1}"
    (on, told_nothing, _), (off, told_false, said) = run(path), run(path, told, new_run=True)
    assert told_nothing != told_false
    assert "kwargs.thinkng: the model's chat template does not use it" in said
    assert "enable_thinking: the model" not in said
    notes = [finding.message for finding in findings_of(write(), [told]) if finding.kind == "note"]
    assert [note.partition(":")[0] for note in notes] == [
        "generation.chat_template_kwargs.enable_thinking",
        "generation.chat_template_kwargs.thinkng",
        "the chat template writes the time, in all rows that of the run's start",
    ]
    write(start=SWITCH)
    keys = off.read_manifest().semantic
    assert keys["generation.chat_template_kwargs.enable_thinking"] is False
    assert keys["rendered chat template"] != on.read_manifest().semantic["rendered chat template"]
    for override, message in (
        (
            "generation.chat_template_kwargs={tokenize: true}",
            "chat_template_kwargs.tokenize is set by kvbatch",
        ),
        ("generation.chat_template_kwargs={a: .nan}", "must be finite"),
    ):
        with pytest.raises(JobFileError, match=message):
            load_job(path, [override])
    with pytest.raises(JobFileError, match="has no meaning with prompt.chat: false"):
        load_job(path, [told, "prompt.chat=false"])


def test_a_row_of_a_batch_tells_it_over_the_job(write, tokenizer):
    body = {"messages": [{"role": "user", "content": "fox"}]}
    own = [
        {},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"other": "x"}, "stop": "<|im_end|>"},
        {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": [1]},
        {"chat_template_kwargs": {"name": "<|im_end|>"}},
        {"stop": ["<|im_end|>\n"]},
    ]
    records = [{"custom_id": str(n), "body": body | more} for n, more in enumerate(own)]
    path = write(records, SWITCH, input={"format": "openai-batch"})
    job = yaml.safe_load(path.read_text())
    del job["prompt"]
    job["generation"]["chat_template_kwargs"] = {"enable_thinking": False}
    path.write_text(yaml.safe_dump(job))
    engine = Backwards()
    found, _, _ = run(path, engine=engine)
    texts = [tokenizer.decode(list(request.prompt_token_ids)) for request in engine.requests]
    assert [text.startswith("off") for text in texts] == [True, False, True]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [end in request.sampling.stop_token_ids for request in engine.requests] == [False, False, True]
    rows = pl.read_parquet(found.shards / "*.parquet")
    assert rows["kvb_error_code"].to_list() == [None] * 3 + ["bad_request"] * 4
    for message, part in zip(
        rows["kvb_error_message"][3:],
        ["kwargs.messages is set", "must be an object", "holds '<|im_end|>'", "the control token"],
        strict=True,
    ):
        assert part in message
