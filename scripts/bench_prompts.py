"""Write the prompts that job files would run, as the file that bench_engine.py reads.

    bench_prompts.py jobs/legal.yaml jobs/logs.yaml jobs/code.yaml --each 8 --out prompts.json

Documents are drawn with a fixed seed; one that is too long loses its tail. Prints the model's directory.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

from kvbatch.corpus import Corpus
from kvbatch.job_file.load import load_job
from kvbatch.job_file.sections import LongDocumentSection
from kvbatch.model.handle import open_model
from kvbatch.prompts.rendering import PromptBuilder


def prompts_of(job_file: Path, num_prompts: int, max_new_tokens: int) -> tuple[Path, list[dict[str, Any]]]:
    """Return the directory of a job's model, and prompts of documents drawn from its input."""
    job = load_job(job_file)
    model = open_model(job.model, job.engine, job.cache.policy)
    documents = [document for document in Corpus(job.input.spec()).documents() if document.text]
    drawn = random.Random(7).sample(documents, min(num_prompts, len(documents)))
    builder = PromptBuilder(model.tokenizer, job.prompt)
    prompts = builder.build_batch(
        drawn, model.config.max_context - max_new_tokens, LongDocumentSection(on_too_long="truncate")
    )
    rows = [
        {"id": str(document.row_id), "kind": job.name, "prompt_token_ids": prompt.token_ids}
        for document, prompt in zip(drawn, prompts, strict=True)
        if prompt.runs
    ]
    return model.files.directory, rows


def main() -> None:
    """Parse the command line and write the file."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("jobs", nargs="+", type=Path, metavar="JOB.yaml", help="job files of one model")
    p.add_argument("--each", type=int, default=8, help="prompts of each job (default 8)")
    p.add_argument("--max-new", type=int, default=512, help="leave room for so many new tokens (default 512)")
    p.add_argument("--out", type=Path, required=True, help="file to write")
    args = p.parse_args()
    rows = []
    for job_file in args.jobs:
        model_path, job_rows = prompts_of(job_file, args.each, args.max_new)
        rows += job_rows
    args.out.write_text(json.dumps(rows), encoding="utf-8")
    lengths = sorted(len(row["prompt_token_ids"]) for row in rows)
    print(f"{args.out}: {len(rows)} prompts, {sum(lengths):,} tokens, {lengths[0]:,} to {lengths[-1]:,} each")
    print(f"model: {model_path}")


if __name__ == "__main__":
    main()
