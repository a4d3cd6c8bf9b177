"""Measure what a compressed cache costs in quality, through the real cache.

Each document's first tokens are read by the engine under a preset; then, with nothing more cached, its real
continuation is fed token by token as if it followed, and the planted codes are asked for. Everything is compared with
the same engine at full precision: KL and top-1 agreement of the continuation, its NLL, and the NLL of the codes asked
for without the question being known beforehand (`needle`) and with it as the prompt's own question (`needle_known`).
Bytes are asked of the allocator. Prints a table to stderr and one JSON object, the last line of stdout.

Corpora are JSONL or Parquet files with a `text` column, one per kind: --data legal=PATH --data logs=PATH …
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.calibration import calibration_text
from engine.detokenizer import Detokenizer
from engine.models import load_model
from engine.models.basis import ROTATED
from engine.teacher_forcing import Reading, reading
from kvbatch.estimate.pareto_plot import Point, draw_frontier
from kvbatch.model.source import resolve_model
from kvbatch.prompts.rendering import REPEAT
from kvcache.config import KVCacheConfig

NUM_CODES = 4
WORDS = (
    "amber",
    "basalt",
    "cedar",
    "delta",
    "ember",
    "falcon",
    "garnet",
    "harbor",
    "indigo",
    "jasper",
    "kelp",
    "lotus",
)


@dataclass(frozen=True)
class Case:
    """One document: context with planted codes, its continuation, and questions with their answers."""

    kind: str
    context: list[int]
    continuation: list[int]
    questions: list[tuple[list[int], list[int]]]


def texts(path: str) -> Iterator[str]:
    """Yield the texts of a corpus file; a plain text file is one long text."""
    if path.endswith(".txt"):
        whole = Path(path).read_text(encoding="utf-8")
        step = 40_000
        yield from (whole[i : i + step] for i in range(0, len(whole) - step, step))
        return
    from kvbatch.corpus import Corpus, InputSpec

    for document in Corpus(InputSpec(paths=(path,))).documents():
        if document.text:
            yield document.text


def make_cases(kind: str, path: str, tokenizer, args: argparse.Namespace) -> list[Case]:
    """Return the first documents that are long enough, with codes planted at random depths."""
    chance = random.Random(f"{args.seed}:{kind}")
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    cases = []
    for text in texts(path):
        ids = tokenizer.encode(text[: 8 * (args.context + args.continuation)], add_special_tokens=False)
        if len(ids) < args.context + args.continuation:
            continue
        names = chance.sample(WORDS, NUM_CODES)
        codes = [str(chance.randrange(10000, 99999)) for _ in names]
        planted = [encode(f"\nThe secret code of {n} is {c}.\n") for n, c in zip(names, codes, strict=True)]
        body = ids[: args.context - sum(map(len, planted))]
        # not in the last tenth: the recent window would keep it whatever the method
        places = sorted(chance.sample(range(len(body) // 20, len(body) * 9 // 10), NUM_CODES))
        context, last = [], 0
        for place, sentence in zip(places, planted, strict=True):
            context += body[last:place] + sentence
            last = place
        context += body[last:]
        questions = [
            (encode(f"\n\nWhat is the secret code of {n}? The secret code of {n} is"), encode(f" {c}"))
            for n, c in zip(names, codes, strict=True)
        ]
        cases.append(Case(kind, context, ids[len(body) : len(body) + args.continuation], questions))
        if len(cases) == args.skip + args.docs:
            break
    return cases[args.skip :]


def make_llm(model, tokenizer, config: KVCacheConfig, args: argparse.Namespace) -> EngineCore:
    """Return an engine under one policy."""
    encode = lambda text: tuple(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    engine = EngineConfig(
        int(args.memory_gib * (1 << 30)),
        step_tokens=args.step_tokens,
        cache=config,
        repeat_token_ids=encode(REPEAT),
        calibration_token_ids=encode(calibration_text()),
    )
    return EngineCore(model, engine, Detokenizer(tokenizer))


def read(llm: EngineCore, case: Case, probe: list[int] | None = None):
    """Read a case's context; see `reading`."""
    sampling = SamplingParams(max_new_tokens=1)
    return reading(llm, Request(0, case.context, sampling, probe_token_ids=tuple(probe or ())))


def answer_nll(context: Reading, question: list[int], answer: list[int]) -> float:
    """Return the mean NLL of an answer's tokens after its question."""
    probs = context.log_probs(question + answer)[len(question) :]
    return -float(probs.gather(1, torch.tensor(answer)[:, None]).mean())


def measure(llm: EngineCore, case: Case, known: bool, reference: dict | None) -> dict:
    """Return a case's figures, the reference's own (with its log-probabilities) if there is none to compare with."""
    target = torch.tensor(case.continuation)
    with read(llm, case) as context:
        probs = context.log_probs(case.continuation)
        figures = {
            "nll": -float(probs.gather(1, target[:, None]).mean()),
            "answers": [answer_nll(context, question, answer) for question, answer in case.questions],
            "bytes": context.kept_bytes,
        }
    if reference is None:
        figures["probs"] = probs.half()
    else:
        full = reference["probs"].float()
        figures["kl"] = float((full.exp() * (full - probs)).sum(-1).mean())
        figures["top1"] = float((full.argmax(-1) == probs.argmax(-1)).float().mean())
    if known:
        question, answer = case.questions[0]
        with read(llm, case, probe=question) as context:
            figures["needle_known"] = answer_nll(context, question, answer)
    return figures


def main() -> None:
    """Evaluate the presets asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        required=True,
        help="as model.path of a job: directory, .gguf file, hub id, pypi:package==version",
    )
    parser.add_argument("--data", action="append", required=True, metavar="KIND=PATH")
    parser.add_argument("--presets", default="default,aggressive,logs,extract")
    parser.add_argument("--set", action="append", default=[], metavar="NAME={json of KVCacheConfig changes}")
    parser.add_argument("--docs", type=int, default=12, help="documents of each kind")
    parser.add_argument("--skip", type=int, default=0, help="documents of each kind left out before these")
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--continuation", type=int, default=200)
    parser.add_argument("--step-tokens", type=int, default=1024)
    parser.add_argument("--memory-gib", type=float, default=3.0)
    parser.add_argument("--no-known", action="store_true", help="skip the questions known beforehand")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="no table")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw bytes against divergence")
    args = parser.parse_args()
    args.model = resolve_model(args.model).path

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = load_model(args.model, dtype=torch.float32, basis=ROTATED)  # suits every policy
    policies = {name: KVCacheConfig.preset(name) for name in args.presets.split(",") if name}
    for item in args.set:
        name, _, changes = item.partition("=")
        policies[name] = KVCacheConfig.from_dict(json.loads(changes))
    cases = [c for item in args.data for c in make_cases(*item.split("=", 1), tokenizer, args)]
    if not cases:
        parser.error(f"no document has {args.context + args.continuation:,} tokens")
    full = make_llm(model, tokenizer, KVCacheConfig(), args)
    references = [measure(full, case, False, None) for case in tqdm(cases, desc="full")]
    bf16_ratio = 2 / model.dtype.itemsize  # the full cache in bf16, whatever the model runs in
    del full
    summary = {}
    for name, config in policies.items():
        llm = make_llm(model, tokenizer, config, args)
        rows = []
        for case, reference in zip(cases, tqdm(references, desc=name), strict=True):
            figures = measure(llm, case, not args.no_known, reference)
            rows.append(
                {
                    "kind": case.kind,
                    "kv_ratio": figures["bytes"] / (reference["bytes"] * bf16_ratio),
                    "kl": figures["kl"],
                    "top1": figures["top1"],
                    "nll_delta": figures["nll"] - reference["nll"],
                    "needle_nll_delta": mean(figures["answers"]) - mean(reference["answers"]),
                    "needle_known_nll_delta": figures.get("needle_known", nan) - reference["answers"][0],
                }
            )
        summary[name] = averages(rows)
        if not args.json:
            for kind in dict.fromkeys(row["kind"] for row in rows):
                print(
                    f"{name:24} {kind:8}",
                    line(averages([r for r in rows if r["kind"] == kind])),
                    file=sys.stderr,
                )
            print(f"{name:24} all     ", line(summary[name]), file=sys.stderr)
    if args.plot:
        points = [Point(name, figures["kv_ratio"], figures["kl"]) for name, figures in summary.items()]
        draw_frontier(points, Path(args.plot), full="full cache in bfloat16")
    print(json.dumps(summary))


def averages(rows: list[dict]) -> dict[str, float]:
    """Return the mean of every figure."""
    keys = [key for key in rows[0] if key != "kind"]
    return {key: round(sum(row[key] for row in rows) / len(rows), 5) for key in keys}


def line(figures: dict[str, float]) -> str:
    """Return one line of the table."""
    return "  ".join(f"{key} {value:+.4f}" for key, value in figures.items())


if __name__ == "__main__":
    main()
