"""Measure what is left of documents beyond a model's context that are streamed through it.

A document of --length tokens is read in a context of --context positions: streamed under each preset, and cut to its
end. Its continuation's NLL and that of planted codes, asked for as the prompt's own question or not, are compared with
the same document read whole, where the model's real context holds it. One JSON object a policy on stdout.
"""

import argparse
import json
from math import nan
from statistics import mean

import torch
from eval_compression import Case, answer_nll, make_cases, make_llm
from transformers import AutoTokenizer

from engine import EngineCore, Request, SamplingParams
from engine.models import load_model
from engine.models.basis import ROTATED
from engine.teacher_forcing import reading
from kvbatch.model.source import resolve_model
from kvcache.config import KVCacheConfig


def measure(llm: EngineCore, cases: list[Case], num_kept: int | None, streams: bool) -> dict[str, float]:
    """Return the means of a policy over all cases, each read up to its end, or the last `num_kept` tokens of it."""
    nll, known, unknown, num_bytes = [], [], [], []
    for case in cases:
        tokens = case.context if num_kept is None else case.context[-num_kept:]
        for probe in ((), tuple(case.questions[0][0])) if streams else ((),):
            sampling = SamplingParams(max_new_tokens=256)
            with reading(llm, Request(0, tokens, sampling, probe_token_ids=probe, streams=streams)) as read:
                if probe or not streams:
                    known.append(answer_nll(read, *case.questions[0]))
                if not probe:
                    target = torch.tensor(case.continuation)
                    nll.append(-float(read.log_probs(case.continuation).gather(1, target[:, None]).mean()))
                    unknown += [answer_nll(read, *question) for question in case.questions]
                    num_bytes.append(read.kept_bytes)
    found = {"nll": nll, "needle": unknown, "needle_known": known, "mib": [b / 2**20 for b in num_bytes]}
    return {name: round(mean(values), 4) if values else nan for name, values in found.items()}


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
    parser.add_argument("--presets", default="logs,aggressive,default")
    parser.add_argument("--set", action="append", default=[], metavar="NAME={json of KVCacheConfig changes}")
    parser.add_argument("--context", type=int, default=2048, help="positions")
    parser.add_argument("--length", type=int, default=6000, help="tokens of a document")
    parser.add_argument("--docs", type=int, default=2, help="of each kind")
    args = parser.parse_args()
    args.model = resolve_model(args.model).path
    args.seed, args.skip, args.continuation, args.step_tokens, args.memory_gib = 7, 0, 200, 1024, 3.0
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    cases = [
        case
        for item in args.data
        for case in make_cases(
            *item.split("=", 1), tokenizer, argparse.Namespace(**vars(args) | {"context": args.length})
        )
    ]
    whole = load_model(args.model, dtype=torch.float32, basis=ROTATED)
    short = load_model(args.model, dtype=torch.float32, max_context=args.context, basis=ROTATED)
    policies = {name: KVCacheConfig.preset(name) for name in args.presets.split(",") if name}
    for item in args.set:
        name, _, changes = item.partition("=")
        policies[name] = KVCacheConfig.from_dict(json.loads(changes))
    if args.length + 256 <= whole.config.max_context:
        show("read whole", measure(make_llm(whole, tokenizer, KVCacheConfig(), args), cases, None, False))
    cut = make_llm(short, tokenizer, KVCacheConfig(), args)
    show("cut to its end", measure(cut, cases, args.context - 256, False))
    del cut
    for name, policy in policies.items():
        show(f"streamed, {name}", measure(make_llm(short, tokenizer, policy, args), cases, None, True))


def show(name: str, figures: dict[str, float]) -> None:
    """Print one line."""
    print(json.dumps({"policy": name} | figures), flush=True)


if __name__ == "__main__":
    main()
