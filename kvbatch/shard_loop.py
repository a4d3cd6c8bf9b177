"""The second pass: rows go to the engine in the plan's order, shards are written as they fill."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from engine import Request, Result, SamplingParams
from kvbatch.config import config_hash
from kvbatch.errors import InputError
from kvbatch.manifest import RunDirectory
from kvbatch.plan import PlanSummary, read_plan, windows
from kvbatch.runlog import RunLog
from kvbatch.shard import OpenShard, row_seed

if TYPE_CHECKING:
    from engine import LLM
    from kvbatch.run import JobRunner

PROMPT_BATCH = 32  # prompts made ahead of the engine


class ShardLoop:
    """Feed the engine from the second pass, and write shards as their rows end."""

    def __init__(self, runner: "JobRunner", run: RunDirectory, log: RunLog, llm: "LLM | None"):
        self._runner, self._run, self._log, self._llm = runner, run, log, llm
        self._job = runner.job
        self._open: dict[int, OpenShard] = {}
        self._end_ids = () if self._job.generation.ignore_eos else _turn_end(runner.model.tokenizer)

    def run(self, plan: PlanSummary) -> None:
        """Run every planned row.

        Raises:
            InputError: The input is not what was planned.
            OutputError: The run directory cannot be written.
        """
        requests = self._requests(plan)
        if self._llm is None:
            for _ in requests:
                raise AssertionError("a row wants to run, but the plan has none")
        else:
            for result in self._llm.generate(drained_before(requests, plan.peak_row)):
                self._finish(result)
        assert not self._open, "the engine kept rows to itself"

    def _finish(self, result: Result) -> None:
        number, place = divmod(result.request_id, self._job.output.shard_rows)
        shard = self._open[number]
        shard.results[place] = result
        self._runner.progress.advance(1, result.prompt_tokens + result.completion_tokens)
        if result.finish_reason == "error":
            row_id = shard.rows[place]["row_id"]
            self._log.event("row failed", row_id=row_id, message=result.error_message)
        if shard.is_done:
            self._commit(shard)

    def _requests(self, plan: PlanSummary) -> Iterator[Request]:
        """Read the corpus again and yield its rows in the plan's order, as the engine asks for them."""
        rows = read_plan(self._run.path)
        number = -1
        for number, documents in enumerate(
            windows(self._runner.corpus.documents(), self._job.output.shard_rows)
        ):
            shard = OpenShard(number, documents, next(rows, []), self._runner.answers)
            self._open[number] = shard
            self._runner.progress.advance(len(documents) - len(shard.running), 0)
            if shard.is_done:
                self._commit(shard)
            yield from self._shard_requests(shard)
        if number + 1 != plan.num_shards:
            raise InputError(
                "the input changed while the job ran: it has fewer rows than were planned; run it again"
            )

    def _shard_requests(self, shard: OpenShard) -> Iterator[Request]:
        first = shard.number * self._job.output.shard_rows
        planner_limit = self._runner.model.config.max_context - self._job.generation.max_new_tokens
        for start in range(0, len(shard.running), PROMPT_BATCH):
            places = shard.running[start : start + PROMPT_BATCH]
            prompts = self._runner.builder.build_batch(
                [shard.documents[place] for place in places], planner_limit, self._job.long_document
            )
            for place, prompt in zip(places, prompts, strict=True):
                assert prompt.num_tokens == shard.rows[place]["prompt_tokens"], (
                    "a prompt differs from its plan"
                )
                sampling = self._sampling(shard.rows[place]["row_id"], prompt.sampling)
                yield Request(
                    first + place,
                    prompt.token_ids,
                    sampling,
                    prompt.prefix_tokens,
                    self._runner.builder.probe_ids,
                    self._runner.answers and self._runner.answers.constraint,
                )

    def _sampling(self, row_id: str, own: Mapping[str, Any]) -> SamplingParams:
        values = self._job.generation.model_dump(exclude={"json_schema", "choices"}) | dict(own)
        values["stop_token_ids"] = (*values["stop_token_ids"], *self._end_ids)
        return SamplingParams(**values | {"seed": row_seed(self._job.generation.seed, row_id)})

    def _commit(self, shard: OpenShard) -> None:
        with self._runner.stopper.shield():
            rows = shard.output_rows(self._job.generation.seed, self._run.run_id, config_hash(self._job))
            shard.write(self._runner.corpus.to_table(shard.documents), rows, self._run.path)
            del self._open[shard.number]
        self._log.event("shard written", shard=shard.number, rows=len(rows))


def drained_before(requests: Iterator[Request], request_id: int) -> Iterator[Request | None]:
    """Let the engine drain once, before the first row of the plan's fullest bin.

    So this bin is admitted whole, and the bytes held at the peak are those planned: not more, as the pool has no
    more, and not less.
    """
    for request in requests:
        if request.request_id == request_id:
            yield None
        yield request


def _turn_end(tokenizer: Any) -> tuple[int, ...]:
    """Return the token that ends a turn, which is not always among those of generation_config.json."""
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
