"""Memory of a whole run does not grow with its rows; `scripts/bench_scale.py` measures the same at full size."""

import io
import tracemalloc

import pytest

from kvbatch.job_file.load import load_job
from kvbatch.run.entry import run_job
from scripts.bench_scale import NullEngine

BYTES_A_ROW = 1_000  # more than caches and plots come to here, less than one dict of the plan


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows_of_a_run(job_file, monkeypatch):
    monkeypatch.setattr(
        "kvbatch.report.html.figures.MAX_POINTS", 100
    )  # fewer than there are rows, as in a long run
    rows = [{"id": f"r{n}", "text": f"the quick fox {n}"} for n in range(1_600)]
    sections = {"engine": {"max_sequences": 1}, "output": {"shard_rows": 50}, "input": {"incremental": True}}
    path = job_file(rows, **sections)  # a bin a row

    def peak_bytes(num_rows: int) -> int:
        tracemalloc.start()
        try:
            job = load_job(path, [f"input.limit={num_rows}"])
            assert run_job(job, stream=io.StringIO(), make_llm=lambda *_: NullEngine()).is_new
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(20), peak_bytes(40)  # imports, and what is made once
    few, many = peak_bytes(300), peak_bytes(1_600)  # which reuses the few over
    assert (many - few) / 1_300 < BYTES_A_ROW
