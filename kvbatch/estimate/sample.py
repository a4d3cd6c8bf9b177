"""A seeded sample of a job's rows, as requests to the engine."""

import hashlib
import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine import Request
    from kvbatch.corpus import Document
    from kvbatch.opened_job import OpenedJob
    from kvbatch.prompts.long_document import LongDocuments


def sample_requests(opened: "OpenedJob", size: int) -> list[tuple[str, "Request"]]:
    """Return ids and requests of rows that run: those whose ids have the smallest hash, whatever their order."""
    job, prompts = opened.job, opened.long_documents()
    kept: list[tuple[int, int, str, Request]] = []
    for number, document in enumerate(opened.corpus.documents()):
        if document.status != "ok":
            continue
        key = hashlib.sha256(f"{job.generation.seed}:quality:{document.row_id}".encode()).digest()
        rank = -int.from_bytes(key[:8], "big")  # the heap's smallest goes first
        if len(kept) == size and rank <= kept[0][0]:
            continue
        request = _request(opened, prompts, document, int.from_bytes(key[8:16], "big"))
        if request:
            heapq.heappush(kept, (rank, -number, str(document.row_id), request))
            if len(kept) > size:
                heapq.heappop(kept)
    return [(row_id, request) for _, _, row_id, request in sorted(kept, reverse=True)]


def _request(
    opened: "OpenedJob", prompts: "LongDocuments", document: "Document", choice: int
) -> "Request | None":
    """Return a row's request, or one of several, of some part and question; None if the full cache cannot hold it."""
    from engine import Request

    [prompt] = prompts.build_batch([document])
    if not prompt.runs or prompt.outcome == "streamed":
        return None
    row_id = str(document.row_id)
    sampling = opened.sampling.params(row_id, prompt.sampling)
    chosen = prompt.requests[choice % len(prompt.requests)]
    return Request(
        0, chosen.token_ids, sampling, chosen.prefix_tokens, tuple(chosen.probe_ids), opened.constraint
    )
