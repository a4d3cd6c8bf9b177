"""Measure the engine on a file of prompts and print one RESULT line.

Times `engine.EngineCore` alone, or with `--peer transformers` that library's `generate` on the same token ids in
the same dtype, one document at a time. Greedy, end of text ignored; loading the model is not counted. Run
both one after the other on a quiet machine and quote the ratio.

The prompts file is a JSON list of {"id": …, "kind": …, "prompt_token_ids": [int, …]}.
"""

import argparse
import json
import resource
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvbatch.model.source import resolve_model

Prompts = list[list[int]]


@dataclass(frozen=True)
class Measured:
    """What one runner generated, how long it took and what it adds to the RESULT line."""

    token_ids: list[list[int]]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


def run_kvbatch(args: argparse.Namespace, prompts: Prompts) -> Measured:
    """Generate with our own engine.

    Raises:
        RuntimeError: A prompt cannot be run; its time must not count as if it had been.
    """
    import torch
    from transformers import AutoTokenizer

    from engine import EngineConfig, EngineCore, Request, SamplingParams
    from engine.detokenizer import Detokenizer
    from engine.memory import resolve_budget
    from engine.memory_division import cache_layout
    from engine.models import load_model
    from engine.models.basis import basis_for
    from engine.request_pages import request_pages
    from kvbatch.model.handle import resolve_device
    from kvbatch.model.precision import choose_precision
    from kvcache.config import KVCacheConfig

    device = resolve_device(args.device)
    dtype = getattr(torch, choose_precision(args.dtype, device).dtype)
    config = EngineConfig(
        memory_budget_bytes=resolve_budget(args.memory, device),
        step_tokens=args.step_tokens,
        max_sequences=args.max_sequences,
        prompt_lookup=not args.no_prompt_lookup,
        cache=KVCacheConfig.preset(
            args.preset,
            overlap={"auto": None, "on": True, "off": False}[args.overlap],
            **({"dtype": args.cache_dtype} if args.cache_dtype else {}),
        ),
    )
    model = load_model(
        args.model,
        dtype=dtype,
        device=device,
        weight_quant=args.weight_quant,
        basis=basis_for(config.cache, args.weight_quant),
    )
    sampling = SamplingParams(max_new_tokens=args.max_new, ignore_eos=True)
    requests = [Request(index, prompt, sampling) for index, prompt in enumerate(prompts)]
    # As in a job, the pool is as large as the work needs, and never larger than the budget.
    layout = cache_layout(model.config, config, dtype.itemsize)
    needed = sum(request_pages(layout, len(prompt), args.max_new) for prompt in prompts)
    config = replace(config, pool_pages=needed)
    llm = EngineCore(
        model, config, Detokenizer(AutoTokenizer.from_pretrained(args.model, local_files_only=True))
    )

    start = time.perf_counter()
    results = {result.request_id: result for result in llm.generate(requests)}
    seconds = time.perf_counter() - start

    for index in range(len(prompts)):
        if results[index].finish_reason == "error":
            raise RuntimeError(f"prompt {index}: {results[index].error_message}")
    facts = {
        "kv_peak_bytes": llm.stats().kv_peak_bytes,
        "kv_allocated_bytes": llm.stats().kv_allocated_bytes,
        "dtype": _name(dtype),
        "weight_quant": args.weight_quant,
        "step_tokens": args.step_tokens,
        "preset": args.preset,
        "overlaps_compression": llm.budget.overlaps_compression,
    }
    return Measured([results[index].token_ids for index in range(len(prompts))], seconds, facts)


def run_transformers(args: argparse.Namespace, prompts: Prompts) -> Measured:
    """Generate with transformers, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    from kvbatch.model.handle import resolve_device
    from kvbatch.model.precision import choose_precision

    device = resolve_device(args.device)
    dtype = getattr(torch, choose_precision(args.dtype, device).dtype)
    model = (
        AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, local_files_only=True).to(device).eval()
    )
    model.generation_config.eos_token_id = None

    outputs = []
    start = time.perf_counter()
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device)
            generated = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.max_new,
                do_sample=False,
                pad_token_id=0,
            )
            outputs.append(generated[0, len(prompt) :].tolist())
    return Measured(outputs, time.perf_counter() - start, {"dtype": _name(dtype)})


def result_line(name: str, prompts: Prompts, measured: Measured) -> str:
    """Return the RESULT line: prompt and generated tokens over wall time, and the process's peak memory."""
    num_prompt_tokens = sum(map(len, prompts))
    num_generated = sum(map(len, measured.token_ids))
    # ru_maxrss is in KiB, on macOS in bytes.
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
    facts = {
        "docs": len(prompts),
        "prompt": num_prompt_tokens,
        "generated": num_generated,
        "wall_s": round(measured.seconds, 2),
        "tokens_per_s": round((num_prompt_tokens + num_generated) / measured.seconds, 1),
        "kv": None,
        "evict": None,
        "peak_gb": round(peak_bytes / 1e9, 3),
    }
    return f"RESULT {name} {json.dumps(facts | measured.facts)}"


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark that the command line asks for."""
    args = _arguments(argv)
    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    rows = json.loads(args.prompts.read_text(encoding="utf-8"))[:: args.every][: args.limit]
    prompts = [row["prompt_token_ids"] for row in rows]
    name = args.peer or "kvbatch"
    measured = run_transformers(args, prompts) if args.peer else run_kvbatch(args, prompts)
    print(result_line(name, prompts, measured))
    if args.out:
        args.out.write_text(json.dumps(measured.token_ids), encoding="utf-8")


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "--model",
        required=True,
        help="as model.path of a job: directory, .gguf file, hub id, pypi:package==version",
    )
    p.add_argument("--prompts", type=Path, required=True, help="JSON file of prompts")
    p.add_argument("--every", type=int, default=2, help="take every n-th prompt (default 2)")
    p.add_argument("--limit", type=int, default=12, help="at most this many prompts (default 12)")
    p.add_argument("--max-new", type=int, default=64, help="tokens generated for each (default 64)")
    p.add_argument("--preset", default="none", help="cache policy (default none: full precision)")
    p.add_argument(
        "--overlap",
        choices=("auto", "on", "off"),
        default="auto",
        help="compress beside the model (default auto)",
    )
    p.add_argument(
        "--cache-dtype", choices=("auto", "bfloat16"), help="of tokens kept whole (default: the preset's)"
    )
    p.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    p.add_argument("--weight-quant", choices=("int8",), help="keep the layers' weights in int8")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--step-tokens", type=int, default=1024, help="most tokens of one step (default 1024)")
    p.add_argument("--max-sequences", type=int, default=64, help="most rows at once (default 64)")
    p.add_argument("--memory", default="4GiB", help='for keys and values: "4GiB", "60%%" (default 4GiB)')
    p.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    p.add_argument("--no-prompt-lookup", action="store_true", help="no draft tokens")
    p.add_argument("--peer", choices=("transformers",), help="measure this library instead")
    p.add_argument("--out", type=Path, help="write the generated token ids here")
    args = p.parse_args(argv)
    args.model = resolve_model(args.model).path
    return args


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()
