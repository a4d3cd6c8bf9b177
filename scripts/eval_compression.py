"""Measure what a compressed cache costs in quality, through the real cache, on one model or several side by side.

Each document's first tokens are read by the engine under a preset; then, with nothing more cached, its real
continuation is fed token by token as if it followed, and the planted codes are asked for. Everything is compared with
the same engine at full precision: KL and top-1 agreement of the continuation, its NLL, and the NLL of the codes asked
for without the question being known beforehand (`needle`) and with it as the prompt's own question (`needle_known`).
Presets are fitted to each model, as a job's are. Bytes are asked of the allocator, and held against a full cache in
bfloat16. Prints a table to stderr and one JSON object, the last line of stdout.

Corpora are JSONL or Parquet files with a `text` column, one per kind: --data legal=PATH --data logs=PATH …
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from evaluation import Model, Results, add_arguments, models, print_side_by_side
from tqdm import tqdm

from engine import EngineCore, Request, SamplingParams
from engine.detokenizer import Detokenizer
from engine.memory_division import cache_layout
from engine.request_pages import request_pages
from engine.teacher_forcing import Reading, reading
from kvbatch.estimate.pareto_plot import Point, draw_frontier
from kvcache.config import KVCacheConfig

NUM_CODES = 4
WORDS = tuple("amber basalt cedar delta ember falcon garnet harbor indigo jasper kelp lotus".split())  # noqa: SIM905


@dataclass(frozen=True)
class Case:
    """One document: context with planted codes, its continuation, and questions with their answers."""

    kind: str
    number: int
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


def make_cases(kind: str, path: str, model: Model, args: argparse.Namespace) -> list[Case]:
    """Return the first documents that are long enough, with codes planted at random depths."""
    chance = random.Random(f"{args.seed}:{kind}")
    encode = model.encode
    cases = []
    for text in texts(path):
        ids = encode(text[: 8 * (args.context + args.continuation)])
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
        cases.append(
            Case(kind, len(cases), context, ids[len(body) : len(body) + args.continuation], questions)
        )
        if len(cases) == args.skip + args.docs:
            break
    return cases[args.skip :]


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


class Engines:
    """One engine a policy, each with a pool for one document."""

    def __init__(self, model: Model, args: argparse.Namespace):
        self._model, self._args = model, args
        self._made: dict[str, EngineCore] = {}

    def of(self, name: str, policy: KVCacheConfig) -> EngineCore:
        """Return the engine of a policy."""
        if name not in self._made:
            decoder = self._model.decoder
            config = self._model.config(policy, step_tokens=self._args.step_tokens, max_sequences=1)
            layout = cache_layout(decoder.config, config, decoder.dtype.itemsize)
            config = replace(config, pool_pages=request_pages(layout, self._args.context, 1))
            self._made[name] = EngineCore(decoder, config, Detokenizer(self._model.tokenizer))
        return self._made[name]


def evaluate(model: Model, results: Results, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of every policy on every document, those measured before among them."""
    policies = model.policies(args.presets, args.set)
    cases = [case for item in args.data for case in make_cases(*item.split("=", 1), model, args)]
    if not cases:
        sys.exit(f"no document has {args.context + args.continuation:,} tokens of {model.name}")
    engines, rows = Engines(model, args), []
    for case in tqdm(cases, desc=model.name):
        reference = None
        for name, policy in policies.items():
            of = {
                "model": model.name,
                "policy": repr(policy),
                "kind": case.kind,
                "document": case.number,
                "tokens": [args.context, args.continuation],
                "known": not args.no_known,
                "seed": args.seed,
            }
            figures = results.get(of)
            if figures is None:
                if reference is None:
                    reference = measure(engines.of("", KVCacheConfig()), case, False, None)
                found = measure(engines.of(name, policy), case, not args.no_known, reference)
                full_bytes = reference["bytes"] * 2 / model.decoder.dtype.itemsize
                figures = {
                    "kv_ratio": found["bytes"] / full_bytes,
                    "kl": found["kl"],
                    "top1": found["top1"],
                    "nll_delta": found["nll"] - reference["nll"],
                    "needle": mean(found["answers"]) - mean(reference["answers"]),
                    "needle_known": found.get("needle_known", nan) - reference["answers"][0],
                }
                results.put(of, figures)
            rows.append({"kind": case.kind, "policy": name, **figures})
    return rows


def main() -> None:
    """Evaluate the presets asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--data", action="append", required=True, metavar="KIND=PATH")
    parser.add_argument("--set", action="append", default=[], metavar="NAME={json of KVCacheConfig changes}")
    parser.add_argument("--docs", type=int, default=12, help="documents of each kind")
    parser.add_argument("--skip", type=int, default=0, help="documents of each kind left out before these")
    parser.add_argument("--context", type=int, default=4000)
    parser.add_argument("--continuation", type=int, default=200)
    parser.add_argument("--step-tokens", type=int, default=1024)
    parser.add_argument("--no-known", action="store_true", help="skip the questions known beforehand")
    parser.add_argument("--json", action="store_true", help="no table")
    parser.add_argument(
        "--plot", metavar="FILE.svg", help="draw bytes against divergence, of the first model"
    )
    args = parser.parse_args()
    results = Results(args.results)
    summary: dict[str, dict[str, dict[str, float]]] = {}
    by_kind: dict[str, dict[str, dict[str, float]]] = {}
    for model in models(args):
        rows = evaluate(model, results, args)
        for row in rows:
            mine = [other for other in rows if other["policy"] == row["policy"]]
            summary.setdefault(model.name, {})[row["policy"]] = averages(mine)
            kind = f"{model.name}, {row['kind']}"
            alike = [other for other in mine if other["kind"] == row["kind"]]
            by_kind.setdefault(kind, {})[row["policy"]] = averages(alike)
    if not args.json:
        print_side_by_side(by_kind)
        print_side_by_side(summary)
    if args.plot:
        first = next(iter(summary.values()))
        points = [Point(name, figures["kv_ratio"], figures["kl"]) for name, figures in first.items()]
        draw_frontier(points, Path(args.plot), full="full cache in bfloat16")
    print(json.dumps(summary))


def averages(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the mean of every figure."""
    keys = [key for key in rows[0] if key not in ("kind", "policy")]
    return {key: round(mean(row[key] for row in rows), 5) for key in keys}


if __name__ == "__main__":
    main()
