"""Measure prompt lookup: the same rows decoded with it and without, the steps and the tokens a second of each.

What counts is the tail alone, from the first step after the last prompt. With one thread the time is the processor's,
which leaves out what others took of it; the engine's own gate goes by the clock on the wall.

The prompts file is that of bench_engine.py.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.models import Decoder, load_model
from engine.models.basis import ROTATED
from kvbatch.model.source import resolve_model
from kvcache.config import KVCacheConfig


def measure(
    model: Decoder, requests: list[Request], preset: str, lookup: bool
) -> tuple[list[list[int]], dict[str, float]]:
    """Return what the rows say, and the figures of their tail."""
    cache = KVCacheConfig.preset(preset)
    llm = EngineCore(model, EngineConfig(768 << 20, cache=cache, prompt_lookup=lookup), str)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    execute, num_steps, started_s, num_before = llm.runner.execute, 0, 0.0, 0

    def watched(plan):
        nonlocal num_steps, started_s, num_before
        if not plan.chunks:
            if not num_steps:
                started_s = clock()
                num_before = sum(s.num_generated for s in llm.scheduler.running)
            num_steps += 1
        return execute(plan)

    llm.runner.execute = watched
    said = {result.request_id: result.token_ids for result in llm.generate(requests)}
    seconds = clock() - started_s
    num_tokens = sum(map(len, said.values())) - num_before
    stats = llm.stats()
    return [said[request.request_id] for request in requests], {
        "steps": num_steps,
        "tokens_per_s": num_tokens / seconds,
        "drafted": stats.drafted_tokens,
        "accepted": stats.accepted_tokens,
    }


def main(argv: list[str] | None = None) -> None:
    """Print a table row for every preset and number of rows."""
    args = _arguments(argv)
    torch.set_num_threads(args.threads)
    model = load_model(args.model, dtype=getattr(torch, args.dtype), basis=ROTATED)
    prompts = [
        row["prompt_token_ids"]
        for row in json.loads(args.prompts.read_text(encoding="utf-8"))
        if row["kind"] in args.kind
    ]
    # a prompt ends with what is asked: cut is its middle
    end = args.prompt_tokens // 4
    prompts = [p[: args.prompt_tokens - end] + p[-end:] for p in prompts if len(p) > args.prompt_tokens]
    print("| preset | rows | steps | with | tokens/s | with | ratio | accepted of drafted | same tokens |")
    for preset in args.preset:
        for count in args.rows:
            requests = [
                Request(
                    i,
                    prompt,
                    SamplingParams(args.max_new, ignore_eos=True, temperature=args.temperature, seed=i),
                )
                for i, prompt in enumerate(prompts[:count])
            ]
            (plain, without), (said, found) = (
                measure(model, requests, preset, lookup) for lookup in (False, True)
            )
            same = sum(x == y for x, y in zip(plain, said, strict=True))
            rates = without["tokens_per_s"], found["tokens_per_s"]
            steps = f"{without['steps']} | {found['steps']}"
            print(
                f"| {preset} | {len(requests)} | {steps} | {rates[0]:.1f} | {rates[1]:.1f} | "
                f"{rates[1] / rates[0]:.2f} | {found['accepted']} of {found['drafted']} | {same} of {len(requests)} |",
                flush=True,
            )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model",
        required=True,
        help="as model.path of a job: directory, .gguf file, hub id, pypi:package==version",
    )
    p.add_argument("--prompts", type=Path, required=True, help="JSON file of prompts")
    p.add_argument(
        "--kind", nargs="+", default=["logs", "code", "legal"], help="of the prompts (default all)"
    )
    p.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4], help="rows at once (default 1 2 4)")
    p.add_argument("--preset", nargs="+", default=["none", "default"], help="cache policies")
    p.add_argument("--prompt-tokens", type=int, default=1000, help="of each prompt (default 1000)")
    p.add_argument("--max-new", type=int, default=128, help="tokens generated for each (default 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    p.add_argument("--threads", type=int, default=1, help="default 1")
    args = p.parse_args(argv)
    args.model = resolve_model(args.model).path
    return args


if __name__ == "__main__":
    main()
