"""The plan: bins within the budget, refusals with their numbers, tokens and page arithmetic alone."""

from dataclasses import dataclass, field, replace

import polars as pl
import pytest

from engine.memory_division import Budget
from kvbatch.job_file.load import load_job
from kvbatch.plan.planner import Planner
from kvbatch.prompts.long_document import LongDocuments
from kvbatch.prompts.rendering import PromptBuilder
from kvbatch.run_dir.plan_file import read_plan
from kvcache.config import KVCacheConfig
from kvcache.sizes.compressed import CompressedLayout
from kvcache.sizes.full import CacheLayout, LayerGroup

LAYOUT = CacheLayout((LayerGroup(2, 2, 8),), 4, page_tokens=16)


@dataclass(frozen=True)
class Doc:
    text: str | None
    row_id: str
    status: str = "ok"
    error_code: str | None = None
    error_message: str | None = None
    file: str = "in.jsonl"
    row: int = 1
    sha1: str = "0" * 12
    columns: dict = field(default_factory=dict)
    num_bytes: int = 0


def make_planner(job, builder, layout, capacity_pages, max_context=200):
    documents = LongDocuments(builder, job, max_context - job.generation.max_new_tokens)
    return Planner(job, documents, Budget(layout, 0, 64, 3, capacity_pages))


@pytest.fixture
def plan(job_file, tokenizer, tmp_path):
    def plan(documents, *overrides, capacity_pages=40, max_context=200, layout=LAYOUT):
        job = load_job(job_file([]), ["output.shard_rows=4", *overrides])
        builder = PromptBuilder(tokenizer, job.prompt)
        planner = make_planner(job, builder, layout, capacity_pages, max_context)
        summary = planner.write(iter(documents), tmp_path)
        return summary, [row for shard in read_plan(tmp_path) for row in shard], builder

    return plan


def test_every_row_is_planned_and_bins_hold_the_budget(plan, tmp_path):
    documents = [Doc("7" * (10 * n), f"r{n}") for n in range(1, 11)]
    summary, rows, builder = plan(documents, capacity_pages=80)
    assert [row.index for row in rows] == list(range(10))
    assert [row.shard for row in rows] == [0] * 4 + [1] * 4 + [2] * 2
    assert summary.num_running == 10 and summary.num_shards == 3
    prefix_pages = LAYOUT.sequence_pages(len(builder.prefix_ids))
    bins = pl.read_parquet(tmp_path / "stats" / "bins.parquet")
    assert bins["bin"].to_list() == list(range(summary.num_bins))
    largest = 0
    for number in range(len(bins)):
        held = [row for row in rows if row.bin == number]
        assert 1 <= len(held) <= 3 and len({row.shard for row in held}) == 1
        num_bytes = sum(row.predicted_kv_bytes for row in held) + prefix_pages * LAYOUT.page_bytes
        assert num_bytes == bins["predicted_kv_bytes"][number] <= 80 * LAYOUT.page_bytes
        largest = max(largest, num_bytes)
    for row in rows:
        tokens = row.prompt_tokens + 8
        assert row.predicted_kv_bytes == LAYOUT.sequence_bytes(tokens, len(builder.prefix_ids))
    assert summary.predicted_kv_peak_bytes == largest
    for shard in range(3):  # the order is the bins', each bin's rows together
        running = sorted((row for row in rows if row.shard == shard), key=lambda row: row.order)
        assert [row.order for row in running] == list(range(len(running)))
        assert [row.bin for row in running] == sorted(row.bin for row in running)
    assert bins["rows"].sum() == 10 and bins["packing_efficiency"].max() == 1.0
    assert summary.packing_efficiency == pytest.approx(bins["packing_efficiency"].mean())


def test_rows_that_cannot_run_are_refused_by_name(plan):
    documents = [
        Doc("7" * 400, "long"),
        Doc("7" * 100, "big"),
        Doc(None, "bad", status="rejected", error_code="null_text", error_message="text is null"),
        Doc("7", "fine"),
    ]
    summary, rows, builder = plan(documents, capacity_pages=36)
    assert [row.status for row in rows] == ["error", "error", "rejected", "ok"]
    assert [row.error_code for row in rows] == ["too_long", "over_budget", "null_text", None]
    assert "192" in rows[0].error_message and str(rows[0].prompt_tokens) in rows[0].error_message
    pages = LAYOUT.sequence_pages(rows[1].prompt_tokens + 8, len(builder.prefix_ids))
    pages += LAYOUT.sequence_pages(len(builder.prefix_ids))
    assert f"{pages * LAYOUT.page_bytes:,}" in rows[1].error_message
    assert f"{36 * LAYOUT.page_bytes:,}" in rows[1].error_message
    assert summary.outcomes == {"too_long": 1, "over_budget": 1, "rejected": 1, "fits": 1}
    assert [row.bin for row in rows] == [None, None, None, 0]


def test_truncated_rows_use_the_context_to_its_end(plan):
    _, rows, _ = plan([Doc("7" * 400, "long")], "long_document.on_too_long=truncate", capacity_pages=99)
    assert (rows[0].outcome, rows[0].prompt_tokens, rows[0].truncation_side) == (
        "truncated",
        192,
        "right",
    )
    assert rows[0].dropped_tokens > 200


def test_an_empty_corpus_has_an_empty_plan(plan):
    summary, rows, _ = plan([])
    assert (rows, summary.num_shards, summary.predicted_kv_peak_bytes) == ([], 0, 0)


@pytest.mark.parametrize(
    "overrides",
    [
        ["long_document.on_too_long=split", "long_document.part_tokens=40"],
        [
            "long_document.on_too_long=split",
            "prompt.questions=[a, b, c]",
            "prompt.template='{text} {question}'",
        ],
        ["long_document.on_too_long=stream", "cache.preset=logs", "cache.chunk_size=16", "cache.delay=1"],
    ],
)
def test_a_plan_is_the_same_made_anew_from_its_rows(plan, job_file, tokenizer, tmp_path, overrides):
    documents = [Doc("7" * length, f"r{length}") for length in (10, 30, 150, 175, 400, 900)]
    layout = (
        CompressedLayout((LayerGroup(2, 2, 16),), 4, 2, KVCacheConfig.preset("logs"))
        if "stream" in overrides[0]
        else LAYOUT
    )
    summary, rows, builder = plan(documents, *overrides, capacity_pages=400, layout=layout)
    assert {row.outcome for row in rows} == {"fits", overrides[0].split("=")[1].replace("m", "med")}
    job = load_job(job_file([]), ["output.shard_rows=4", *overrides])
    again = make_planner(job, builder, layout, 400).replan(read_plan(tmp_path))
    assert replace(again, text_hashes={}) == replace(summary, text_hashes={})
    smaller = make_planner(job, builder, layout, 60).replan(read_plan(tmp_path))
    anew, _, _ = plan(documents, *overrides, capacity_pages=60, layout=layout)
    assert replace(smaller, text_hashes={}) == replace(anew, text_hashes={})
    assert 0 < anew.predicted_kv_peak_bytes <= 60 * layout.page_bytes


def test_a_forecast_reads_a_document_once_for_all_its_questions(plan, job_file):
    keys = ["prompt.questions=[a, bb, ccc]", "prompt.template='{text} {question}'"]
    _, rows, builder = plan([Doc("7" * 100, "r")], *keys, capacity_pages=400)
    job = load_job(job_file([]), keys)
    planner = make_planner(job, builder, LAYOUT, 400)
    read = planner.forecast(rows, 400, coefficients=(0, 1, 0, 0, 0)).seconds
    assert read == rows[0].part_tokens[0] + sum(builder.tail_tokens)
    answered = planner.forecast(rows, 400, answer_tokens=5, coefficients=(0, 0, 0, 1, 0)).seconds
    assert answered == 3 * 4  # the first token of each follows from its prompt
