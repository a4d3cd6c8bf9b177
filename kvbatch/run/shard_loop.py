"""The second pass: rows go to the engine in the plan's order, shards are written as they fill."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from engine import Request, Result
from kvbatch.errors import InputError, JobChanged
from kvbatch.prompts.prompt import PromptRequest
from kvbatch.prompts.sampling import row_seed
from kvbatch.run.oom_retry import OomRetry
from kvbatch.run.row_requests import RequestKey, RowRequests
from kvbatch.run.shard import OpenShard
from kvbatch.run_dir.commit import commit_shard, planned_shards, tally
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.event_log import RunLog
from kvbatch.run_dir.fingerprint import config_hash
from kvbatch.run_dir.output_schema import OUTPUT_FIELDS
from kvbatch.run_dir.plan_file import PlanSummary
from kvbatch.run_dir.previous_rows import ReusedRows
from kvbatch.run_dir.resume import Recovered
from kvbatch.run_dir.reuse import Reuse
from kvbatch.run_dir.wal import WriteAheadFile

if TYPE_CHECKING:
    from engine import EngineCore
    from kvbatch.run.session import RunSession

PROMPT_BATCH = 32  # prompts made ahead of the engine


class ShardLoop:
    """Feed the engine from the second pass, and write shards as their rows end.

    A row is in the write-ahead file of its shard as soon as it has ended. What was recovered is not run again.
    """

    def __init__(
        self,
        session: "RunSession",
        run: RunDirectory,
        log: RunLog,
        llm: "EngineCore | None",
        recovered: Recovered,
    ):
        self._session, self._run, self._log, self._llm = session, run, log, llm
        self._opened, self._recovered = session.opened, recovered
        self._job = session.opened.job
        self._common = {"kvb_run_id": run.run_id, "kvb_config_hash": config_hash(self._job)}
        self._open: dict[int, OpenShard] = {}
        self._write_ahead: dict[int, WriteAheadFile] = {}
        self._reused = ReusedRows(Reuse.of(run))
        self._prompts = session.opened.long_documents()
        self._starts: list[int] = []  # of the shards that were read: the index of the first row
        self._running: dict[int, RowRequests] = {}  # in the engine, by the row's index
        self._followers: list[Request] = []
        self._failures: Counter[int] = Counter()  # of rows that are tried again
        self._to_retry: list[int] = []

    def run(self, plan: PlanSummary) -> None:
        """Run every planned row that was not recovered.

        Raises:
            InputError: The input is not what was planned.
            JobChanged: A prompt is not.
            OutputError: The run directory cannot be written.
        """
        requests = self._with_arisen(drained_before(self._requests(plan), RequestKey(plan.peak_row)))
        try:
            if self._llm is None:
                assert not any(requests), "a row is ready to run, but the plan has none"
            else:
                for result, oom_steps in OomRetry(self._llm, self._note_oom).generate(requests):
                    self._finish(result, oom_steps)
            assert not self._open, "the engine kept rows to itself"
        finally:
            for file in self._write_ahead.values():
                file.close()

    def _finish(self, request_result: Result, oom_steps: Sequence[str]) -> None:
        key = request_result.request_id
        assert isinstance(key, RequestKey)
        row = self._running[key.row]
        followers = row.take(key, request_result, oom_steps)
        self._followers += [self._request(*follower) for follower in followers]
        if row.is_done:
            self._finish_row(key.row, self._running.pop(key.row))

    def _finish_row(self, index: int, work: RowRequests) -> None:
        shard, place = self._find(index)
        number, result = shard.number, work.result()
        num_failures = self._failures[index]
        if (
            result.finish_reason == "error"
            and not work.oom_steps
            and num_failures < self._job.limits.row_retries
        ):
            self._failures[index] += 1
            self._to_retry.append(index)
            # no message: the engine's may quote what the row holds
            self._log.event("row retried", row_id=shard.rows[place].row_id, code=work.error_code)
            return
        with self._session.stopper.shield():
            row = shard.finish(place, work, num_failures)
            self._session.check_lock()
            self._write_ahead[number].append(place, row)
        self._session.progress.advance(1, result.prompt_tokens + result.completion_tokens)
        if result.finish_reason == "error":
            row_id = shard.rows[place].row_id
            self._log.event("row failed", row_id=row_id, code=work.error_code)
        if shard.is_done:
            self._commit(shard)

    def _with_arisen(self, requests: Iterator[Request | None]) -> Iterator[Request | None]:
        """Add requests that ended ones give rise to, soon after they did, so that shards do not stay open for long."""
        for request in requests:
            yield request
            while arisen := self._arisen():
                yield from arisen
                if request is not None:
                    break
                yield None  # what was drained is to stay so
        while self._running or self._to_retry:
            yield None  # the last ones end before it is known what arises from them
            yield from self._arisen()

    def _arisen(self) -> list[Request]:
        """Return the requests that answers made possible, and those of rows that are tried again."""
        followers, self._followers = self._followers, []
        retried, self._to_retry = self._to_retry, []
        for index in retried:
            shard, place = self._find(index)
            followers += self._build(shard, [place])
        return followers

    def _requests(self, plan: PlanSummary) -> Iterator[Request]:
        """Read the corpus again and yield its rows in the plan's order, as the engine asks for them."""
        stream = self._opened.corpus.documents()
        index = 0
        for number, planned in enumerate(planned_shards(self._run)):
            self._starts.append(index)
            index += len(planned)
            if number in self._recovered.committed:
                self._session.progress.advance(sum(1 for _ in islice(stream, len(planned))), 0)
                continue
            documents = list(islice(stream, len(planned)))
            finished = self._recovered.rows.pop(number, {})
            shard = OpenShard(
                number,
                documents,
                planned,
                self._job.generation.seed,
                self._common,
                self._opened.answers,
                finished,
            )
            self._reuse(shard)
            self._open[number] = shard
            self._write_ahead[number] = WriteAheadFile(self._run.wal_file(number), OUTPUT_FIELDS)
            self._session.progress.advance(len(documents) - len(shard.running), 0)
            if shard.is_done:
                self._commit(shard)
            yield from self._shard_requests(shard)
            del shard, documents  # before the next ones are read
        if next(stream, None) is not None:
            raise InputError(
                "the input changed while the job ran: it has more rows than were planned; run it again"
            )

    def _reuse(self, shard: OpenShard) -> None:
        places = {
            place: (row.reused_run, row.reused_index)
            for place, row in enumerate(shard.rows)
            if row.reused_run is not None and row.reused_index is not None
        }
        if places:
            shard.reuse(dict(zip(places, self._reused.copy(list(places.values())), strict=True)))

    def _shard_requests(self, shard: OpenShard) -> Iterator[Request]:
        for start in range(0, len(shard.running), PROMPT_BATCH):
            yield from self._build(shard, shard.running[start : start + PROMPT_BATCH])

    def _build(self, shard: OpenShard, places: Sequence[int]) -> Iterator[Request]:
        first = self._starts[shard.number]
        prompts = self._prompts.build_batch([shard.documents[place] for place in places])
        for place, prompt in zip(places, prompts, strict=True):
            planned = shard.rows[place]
            if prompt.num_tokens != planned.prompt_tokens:
                raise JobChanged(
                    f"the prompt of row {planned.row_id!r} has {prompt.num_tokens:,} tokens, by the plan "
                    f"{planned.prompt_tokens:,}: what makes prompts changed; kvbatch run --new-run starts afresh"
                )
            row = RowRequests(first + place, shard.documents[place], prompt, self._job, self._prompts)
            self._running[first + place] = row
            yield from [self._request(*request) for request in row.first()]

    def _find(self, index: int) -> tuple[OpenShard, int]:
        """Return the open shard that has a row, and its place there."""
        number = bisect_right(self._starts, index) - 1
        return self._open[number], index - self._starts[number]

    def _request(self, key: RequestKey, wanted: PromptRequest) -> Request:
        """Return a request of a row, for the engine."""
        shard, place = self._find(key.row)
        row = self._running[key.row]
        sampling = self._opened.sampling.params(shard.rows[place].row_id, row.sampling)
        if ordinal := row.ordinal(key):
            sampling = replace(sampling, seed=row_seed(sampling.seed, str(ordinal)))
        return Request(
            key,
            wanted.token_ids,
            sampling,
            wanted.prefix_tokens,
            wanted.probe_ids,
            self._opened.constraint,
            wanted.streams,
        )

    def _commit(self, shard: OpenShard) -> None:
        with self._session.stopper.shield():
            rows = shard.output_rows()
            self._session.check_lock()
            self._write_ahead[shard.number].create()  # a shard file without a record is then not committed
            facts = shard.write(self._opened.corpus.to_table(shard.documents), rows, self._run)
            self._write_ahead.pop(shard.number).close()
            commit_shard(self._run, shard.number, facts | tally(self._run.run_id, rows))
            del self._open[shard.number]
        self._log.event("shard written", shard=shard.number, rows=len(rows))

    def _note_oom(self, step: str, requests: Sequence[Request]) -> None:
        self._session.progress.note(f"memory ran out: {step.replace('_', ' ')} for {len(requests):,} rows")
        self._log.event("out of memory", step=step, rows=len(requests))


def drained_before(requests: Iterator[Request], request_id: RequestKey) -> Iterator[Request | None]:
    """Let the engine drain once, before the first row of the plan's fullest bin.

    So this bin is admitted whole, and the bytes held at the peak are those planned: not more, as the pool has no
    more, and not less.
    """
    for request in requests:
        if request.request_id == request_id:
            yield None
        yield request
