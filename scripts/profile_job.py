"""Show where a job's seconds and fresh memory pages go, as a table.

    profile_job.py job jobs/legal.yaml -s input.limit=5           a whole job, as `kvbatch run --new-run` runs it
    profile_job.py prompts --model DIR --prompts prompts.json     the engine alone; arguments as of bench_engine.py

Functions are wrapped from outside, so nothing is slower when nobody looks. Layers run kernel by kernel here and not in
compiled passes, or nobody could look: decode steps of few rows take longer. A part's time is its own: what a function
of another part takes inside it is that part's. Work on other threads, such as compression beside the model, is not
seen.
"""

import argparse
import functools
import importlib
import inspect
import json
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.models import compiled_layers as compiled_passes

REST = "other"
_PREFILL, _DECODE = (
    ("prefill_attention", "prefill_attention_pool"),
    ("decode_attention", "decode_attention_pool"),
)
_KERNELS = ("kvcache.kernels.cpu.ops", "kvcache.kernels.reference")

# What belongs to a part, as module:name. "()" behind it: the function returns one that belongs to the part as well.
PARTS: dict[str, tuple[str, ...]] = {
    "opening": ("kvbatch.model.handle:open_model", "kvbatch.corpus.corpus:Corpus.check"),
    "reading": ("kvbatch.corpus.corpus:Corpus.documents",),
    "tokenizing": (
        "kvbatch.prompts.rendering:PromptBuilder.build_batch",
        "engine.engine_core:EngineCore._problem",
    ),
    "planning": ("kvbatch.plan.planner:Planner.write",),
    "loading": ("engine.models:load_model", "engine.engine_core:make_cache"),
    "GEMM": ("engine.models.layers:Passes._project", "engine.models.layers:Passes._add_projected"),
    "vocabulary": ("engine.models.decoder:Decoder.logits",),
    "elementwise": ("engine.models.decoder:Decoder.forward",),
    "attention, prefill": tuple(f"{module}:{name}" for module in _KERNELS for name in _PREFILL),
    "attention, decode": tuple(f"{module}:{name}" for module in _KERNELS for name in _DECODE),
    "around attention": (
        "engine.cache.full:FullCache.attend()",
        "engine.cache.compressed:CompressedBackend.attend()",
    ),
    "compression": (
        "engine.cache.full:FullCache.advance",
        "engine.cache.compressed:CompressedBackend.advance",
    ),
    "sampling": ("engine.engine_core:sample",),
    "detokenizing": ("engine.detokenizer:Detokenizer.__call__", "engine.engine_core:finish_reason"),
    "scheduling": (
        "engine.runner:Runner.execute",
        "engine.scheduler:Scheduler.plan_step",
        "engine.engine_core:EngineCore._fill",
        "engine.monitoring:Monitor.note_step",
    ),
    "writing": (
        "kvbatch.run.shard:OpenShard.output_rows",
        "kvbatch.run.shard:OpenShard.write",
        "kvbatch.run_dir.stats_files:write_stats",
    ),
}


class Clock:
    """Charge this thread's time and page faults to the part that runs."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._stack = [REST]
        self._mark = self._now()

    def watch(self, part: str, target: str) -> None:
        """Put a watched function in the place of the one that `target` names (see `PARTS`)."""
        owner, name = find(target)
        function = getattr(owner, name)
        setattr(owner, name, self._watched(function, part, returns_callback=target.endswith("()")))

    def table(self) -> list[dict[str, Any]]:
        """Return every part that ran, the dearest first."""
        self._charge()
        total = sum(self.seconds.values())
        return [
            {
                "part": part,
                "seconds": round(seconds, 3),
                "share": round(seconds / total, 4),
                "calls": self.calls[part],
                "page_faults": self.faults[part],
            }
            for part, seconds in self.seconds.most_common()
        ]

    def _watched(self, function: Callable, part: str, returns_callback: bool) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            self._enter(part)
            try:
                result = function(*args, **kwargs)
            finally:
                self._leave()
            return self._watched(result, part, False) if returns_callback else result

        def iterate(*args: Any, **kwargs: Any) -> Any:
            items = function(*args, **kwargs)
            step = self._watched(lambda: next(items, REST), part, False)
            while (item := step()) is not REST:
                yield item

        return functools.wraps(function)(iterate if inspect.isgeneratorfunction(function) else call)

    def _enter(self, part: str) -> None:
        self._charge()
        self._stack.append(part)
        self.calls[part] += 1

    def _leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        now = self._now()
        part = self._stack[-1]
        self.seconds[part] += now[0] - self._mark[0]
        self.faults[part] += now[1] - self._mark[1]
        self._mark = now

    @staticmethod
    def _now() -> tuple[float, int]:
        return time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def find(target: str) -> tuple[Any, str]:
    """Return the module or class whose attribute a target of `PARTS` is, and the attribute's name.

    Raises:
        AttributeError: There is no such function any more.
    """
    module, name = target.removesuffix("()").split(":")
    owner = importlib.import_module(module)
    *path, name = name.split(".")
    for step in path:
        owner = getattr(owner, step)
    getattr(owner, name)
    return owner, name


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the parts, one a line, and their sum."""
    print(f"{'part':20} {'seconds':>9} {'share':>7} {'calls':>9} {'page faults':>12}")
    for row in rows:
        print("{part:20} {seconds:9.2f} {share:7.1%} {calls:9,} {page_faults:12,}".format(**row))
    print(f"{'all':20} {sum(row['seconds'] for row in rows):9.2f}")


def main() -> None:
    """Run what the command line names under the clock, and print its table."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, metavar="FILE", help="write the table here as well")
    kinds = p.add_subparsers(dest="kind", required=True)
    job = kinds.add_parser("job", help="a job file")
    job.add_argument("job_file", type=Path)
    job.add_argument("-s", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    kinds.add_parser(
        "prompts", help="prompts through the engine; arguments of bench_engine.py", add_help=False
    )
    args, rest = p.parse_known_args()
    if args.kind == "job":
        from kvbatch.job_file.load import load_job
        from kvbatch.run.entry import run_job

        if rest:
            p.error(f"unknown arguments: {' '.join(rest)}")
        start = functools.partial(run_job, load_job(args.job_file, args.overrides), new_run=True)
    else:
        import bench_engine

        start = functools.partial(bench_engine.main, rest)

    compiled_passes.can_compile = lambda *args, **kwargs: False
    clock = Clock()
    for part, targets in PARTS.items():
        for target in targets:
            clock.watch(part, target)
    start()
    rows = clock.table()
    print_table(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
