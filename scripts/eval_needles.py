"""Count what can still be found in a long document after one reading through a compressed cache.

Ten codes are planted in a document of `--context` tokens, one in each tenth of it. The document is read once under each
preset, the questions unknown; then each code is asked for from that one reading and the answer generated greedily. A
code is found if the answer contains it. Only codes that the full cache finds say anything of the others: it must find
eight of ten, or the model is too weak for the task. Presets are fitted to each model, as a job's are. Prints a table to
stderr and one JSON object, the last line of stdout.

Corpora are as in `eval_compression.py`; documents shorter than the context are joined.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eval_compression import Engines, texts
from evaluation import Model, Results, add_arguments, models, print_side_by_side
from tqdm import tqdm

from engine import EngineCore, Request, SamplingParams
from engine.teacher_forcing import reading
from kvcache.config import KVCacheConfig

DEPOTS = tuple(
    "Aldermoor Brankov Castellane Drumlin Eskdale Farrington Greyfell Halvorsen Ibarra Jarlsberg".split()  # noqa: SIM905
)
NEEDED = 8  # of the full cache's finds, of ten


@dataclass(frozen=True)
class Haystack:
    """A document with codes in it, and a question for each."""

    kind: str
    number: int
    context: list[int]
    questions: list[list[int]]
    codes: list[str]


def haystacks(kind: str, path: str, model: Model, args: argparse.Namespace) -> Iterator[Haystack]:
    """Yield the first documents of a corpus, joined where one is too short."""
    chance = random.Random(f"{args.seed}:{kind}")
    source = texts(path)
    for number in range(args.docs):
        body: list[int] = []
        while len(body) < args.context:
            text = next(source, None)
            if text is None:
                return
            body += model.encode(text[: 8 * args.context] + "\n\n")
        codes = [str(chance.randrange(10_000, 99_999)) for _ in DEPOTS]
        needles = [
            model.encode(f"\nThe access code of the {depot} depot is {code}.\n")
            for depot, code in zip(DEPOTS, codes, strict=True)
        ]
        body = body[: args.context - sum(map(len, needles))]
        share = len(body) // len(needles)
        context: list[int] = []
        for place, needle in enumerate(needles):
            part = body[place * share : (place + 1) * share]
            depth = chance.randrange(share // 10, share * 9 // 10)
            context += part[:depth] + needle + part[depth:]
        questions = [
            model.encode(
                f"\n\nQuestion: What is the access code of the {depot} depot?\n"
                f"Answer: The access code of the {depot} depot is"
            )
            for depot in DEPOTS
        ]
        yield Haystack(kind, number, context, questions, codes)


def find(llm: EngineCore, haystack: Haystack, model: Model, max_new: int) -> dict[str, Any]:
    """Read a document once; return which codes are found, and the bytes that are held."""
    request = Request(0, haystack.context, SamplingParams(max_new_tokens=1))
    found = []
    with reading(llm, request) as context:
        for question, code in zip(haystack.questions, haystack.codes, strict=True):
            answer = context.continued(question, max_new)
            found.append(code in model.tokenizer.decode(answer))
        return {"found": found, "bytes": context.kept_bytes}


def evaluate(model: Model, results: Results, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return for every preset how many codes are found, of all and of those that the full cache finds."""
    policies = {"none": KVCacheConfig(), **model.policies(args.presets)}
    stacks = [stack for item in args.data for stack in haystacks(*item.split("=", 1), model, args)]
    if not stacks:
        sys.exit(f"no corpus has {args.context:,} tokens of {model.name}")
    engines, found = Engines(model, args), {name: [] for name in policies}
    for stack in tqdm(stacks, desc=model.name):
        for name, policy in policies.items():
            of = {
                "model": model.name,
                "policy": repr(policy),
                "kind": stack.kind,
                "document": stack.number,
                "tokens": args.context,
                "seed": args.seed,
            }
            figures = results.get(of)
            if figures is None:
                figures = find(engines.of(name, policy), stack, model, args.max_new)
                results.put(of, figures)
            found[name].append(figures)
        if sum(found["none"][-1]["found"]) < NEEDED:
            print(f"{model.name}: the full cache finds fewer than {NEEDED} of {len(DEPOTS)}", file=sys.stderr)
    whole = [hit for figures in found["none"] for hit in figures["found"]]
    full_bytes = sum(figures["bytes"] for figures in found["none"]) * 2 / model.decoder.dtype.itemsize
    summary = {}
    for name, each in found.items():
        hits = [hit for figures in each for hit in figures["found"]]
        summary[name] = {
            "found": sum(hits),
            "of_the_full_cache": sum(a and b for a, b in zip(hits, whole, strict=True)),
            "full_cache": sum(whole),
            "kv_ratio": round(sum(figures["bytes"] for figures in each) / full_bytes, 4),
        }
    return summary


def main() -> None:
    """Evaluate the presets asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--data", action="append", required=True, metavar="KIND=PATH")
    parser.add_argument("--docs", type=int, default=1, help="documents of each kind")
    parser.add_argument("--context", type=int, default=16_000)
    parser.add_argument("--max-new", type=int, default=12)
    parser.add_argument("--step-tokens", type=int, default=1024)
    args = parser.parse_args()
    results = Results(args.results)
    summary = {model.name: evaluate(model, results, args) for model in models(args)}
    print_side_by_side(summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
