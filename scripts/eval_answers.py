"""Compare the answers of a job under cache presets: how many are right, and how many are those of the full cache.

Takes JSONL of documents with a question each (`text`, `question`, `answer`), and questions about documents of a Parquet
file (`doc_id`, `question`, `answer`, `evidence`), at most one of each kind a document; those answered by yes or no are
a kind of their own. The question stands in the prompt behind the document, as in a job, so presets that compress know
it while they read. An answer is right if it contains the reference or a passage of three words or more named as
evidence, case, spaces and punctuation aside; F1 counts the words that it has in common with the reference. Presets are
fitted to each model, as a job's are. Bytes are held against a full cache in bfloat16, though the models compute in
float32. Prints a table to stderr and one JSON object, the last line of stdout.
"""

import argparse
import hashlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from evaluation import Model, Results, add_arguments, models, print_side_by_side
from tqdm import tqdm

from engine import EngineCore, Request, SamplingParams
from engine.detokenizer import Detokenizer
from kvbatch.job_file.sections import LongDocumentSection, PromptSection
from kvbatch.prompts.rendering import PromptBuilder
from kvcache.config import KVCacheConfig


@dataclass(frozen=True)
class Question:
    """A document, what is asked of it, and what is right: the first answer, or any other in the text's own words."""

    kind: str
    text: str
    question: str
    answers: tuple[str, ...]

    @property
    def row_id(self) -> str:
        """See `PromptDocument`."""
        return self.kind

    @property
    def columns(self) -> dict[str, str]:
        """See `PromptDocument`."""
        return {"question": self.question}


def read_questions(args: argparse.Namespace) -> Iterator[Question]:
    """Yield the questions of all files, those of one file in random order."""
    import polars as pl

    for item in args.documents:
        kind, _, path = item.partition("=")
        with open(path, encoding="utf-8") as lines:
            for row in map(json.loads, lines):
                yield Question(kind, row["text"], row["question"], (row["answer"],))
    for item in args.questions:
        kind, _, paths = item.partition("=")
        path, _, corpus = paths.partition("@")
        texts = dict(pl.read_parquet(corpus, columns=["id", "text"]).iter_rows())
        with open(path, encoding="utf-8") as lines:
            rows = [row for row in map(json.loads, lines) if row["doc_id"] in texts]
        random.Random(args.seed).shuffle(rows)
        for row in rows:
            is_yes_no = row["answer"] in ("Yes", "No")
            passages = [] if is_yes_no else row["evidence"]
            answers = (row["answer"], *(text for text in passages if len(_words(text)) > 2))
            yield Question(kind + " yes/no" * is_yes_no, texts[row["doc_id"]], row["question"], answers)


def make_requests(model: Model, args: argparse.Namespace) -> list[tuple[Question, Request]]:
    """Return the first questions of each kind whose prompts are not too long."""
    found: list[tuple[Question, Request]] = []
    counts: Counter[str] = Counter()
    asked_of: set[tuple[str, str]] = set()
    tokenizer = model.tokenizer
    longest = min(args.max_prompt_tokens, model.decoder.config.max_context - args.max_new)
    plain = PromptBuilder(tokenizer, PromptSection(template="{text}"))
    sampling = SamplingParams(max_new_tokens=args.max_new, stop_token_ids=(tokenizer.eos_token_id,))
    for question in read_questions(args):
        if counts[question.kind] == args.rows or (question.kind, question.text) in asked_of:
            continue
        asked = question.question.replace("{", "{{").replace("}", "}}")
        builder = plain.with_template(f"{{text}}\n\n{asked}")
        prompt = builder.build(question, longest, LongDocumentSection())
        if prompt.runs:
            counts[question.kind] += 1
            asked_of.add((question.kind, question.text))
            probe = tuple(builder.probe_ids)
            found.append((question, Request(len(found), prompt.token_ids, sampling, 0, probe)))
    return found


def evaluate(model: Model, results: Results, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return every answer under every policy, those generated before among them."""
    rows = make_requests(model, args)
    if not rows:
        sys.exit("no question has a prompt of at most --max-prompt-tokens")
    found = []
    for preset, policy in {"none": KVCacheConfig(), **model.policies(args.presets)}.items():
        of = [
            {
                "model": model.name,
                "policy": repr(policy),
                "question": question.question,
                "text": hashlib.sha256(question.text.encode()).hexdigest()[:16],
                "max_new": args.max_new,
            }
            for question, _ in rows
        ]
        missing = [request for (_, request), key in zip(rows, of, strict=True) if results.get(key) is None]
        if missing:
            llm = EngineCore(model.decoder, model.config(policy), Detokenizer(model.tokenizer))
            for done in tqdm(llm.generate(missing), total=len(missing), desc=f"{model.name}, {preset}"):
                ratio = done.kv_kept_bytes / (done.kv_full_bytes * 2 / model.decoder.dtype.itemsize)
                results.put(of[int(done.request_id)], {"answer": done.text, "kv_ratio": ratio})
            del llm
        for (question, request), key in zip(rows, of, strict=True):
            figures = results.get(key)
            assert figures is not None, "every question was asked"
            found.append({"question": question, "request": request, "preset": preset, **figures})
    return found


def summarise(answers: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the figures by preset and kind, as `preset, kind`."""
    full = {a["request"].request_id: a["answer"] for a in answers if a["preset"] == "none"}
    groups: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        groups.setdefault(f"{answer['preset']}, {answer['question'].kind}", []).append(answer)
    return {
        name: {
            "rows": len(mine),
            "right": round(fmean(_right(a["answer"], a["question"].answers) for a in mine), 4),
            "f1": round(fmean(_f1(a["answer"], a["question"].answers[0]) for a in mine), 4),
            "same_as_full": round(fmean(a["answer"] == full[a["request"].request_id] for a in mine), 4),
            "kv_ratio": round(fmean(a["kv_ratio"] for a in mine), 4),
        }
        for name, mine in groups.items()
    }


def main() -> None:
    """Evaluate the presets asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--documents", action="append", default=[], metavar="KIND=FILE.jsonl")
    parser.add_argument(
        "--questions", action="append", default=[], metavar="KIND=FILE.jsonl@DOCUMENTS.parquet"
    )
    parser.add_argument("--rows", type=int, default=25, help="questions of each kind")
    parser.add_argument("--max-prompt-tokens", type=int, default=8000)
    parser.add_argument("--max-new", type=int, default=32)
    parser.add_argument("--answers", metavar="FILE.jsonl", help="where to write every answer")
    args = parser.parse_args()
    results = Results(args.results)
    summary = {}
    lines = []
    for model in models(args):
        answers = evaluate(model, results, args)
        summary[model.name] = summarise(answers)
        for answer in answers:
            question, request = answer["question"], answer["request"]
            lines.append(
                {"model": model.name, "preset": answer["preset"], "kind": question.kind}
                | {"prompt_tokens": len(request.prompt_token_ids), "question": question.question}
                | {"wanted": question.answers, "answer": answer["answer"]}
            )
    print_side_by_side(summary)
    if args.answers:
        with open(args.answers, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    print(json.dumps(summary))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _right(text: str, answers: tuple[str, ...]) -> bool:
    """Return whether a text contains one of the answers."""
    said = f" {' '.join(_words(text))} "
    return any(f" {' '.join(_words(answer))} " in said for answer in answers)


def _f1(text: str, answer: str) -> float:
    said, wanted = Counter(_words(text)), Counter(_words(answer))
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0


if __name__ == "__main__":
    main()
