"""Whatever becomes of the files of a run, every command gives the right answer or names what is wrong: exit code 66."""

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbatch.cli import cli
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.verify import find_problems
from tests.kvbatch.fakes import Backwards

RECORDS = [{"id": f"r{n}", "text": f"{n} fox " * (1 + n * 5 % 7)} for n in range(9)]
RECORDS[4]["text"] = ""  # rejected: a dead letter
NAMED = {65, 66, 69, 73, 75, 78}
UNCHECKED = (
    "logs/",
    "wal/",
    "heartbeat.json",
    "report.html",
    "_SUCCESS",
)  # decide nothing, or are not there yet


class Echo(Backwards):
    """An engine whose answer depends on the prompt alone; it stops after some answers."""

    def __init__(self, after: int | None = None):
        super().__init__()
        self.after = after

    def _answers(self, held):
        texts = {r.request_id: f"answer {sum(r.prompt_token_ids) % 9973}" for r in held}
        for result in super()._answers(held):
            if self.num_answers - 1 == self.after:
                raise KeyboardInterrupt
            yield replace(result, text=texts[result.request_id])


def invoke(*args: str):
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def flip(place: float, keeps_time: bool = False):
    """Return a harm: one bit of a file, at a place of its length."""

    def harm(path: Path) -> None:
        data, found = bytearray(path.read_bytes()), path.stat()
        if data:
            data[min(len(data) - 1, int(place * len(data)))] ^= 4
        path.write_bytes(data)
        if keeps_time:
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    return harm


HARMS = {
    "deleted": lambda path: path.unlink(),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "head": flip(0.0),
    "middle": flip(0.5),
    "tail": flip(1.0),
    "rotten": flip(0.4, keeps_time=True),
}


def rows(run) -> list[tuple]:
    """Return what an export of a run says, without the trust in it."""
    exported = invoke("export", run)
    assert exported.exit_code == 0, exported.stderr
    lines = map(json.loads, exported.stdout.splitlines())
    return [(line["id"], line["kvb_status"], line["output"]) for line in lines]


class Bench:
    """A job whose state is put back before each command."""

    def __init__(self, job_file, monkeypatch, is_exhaustive, **sections):
        self.path, self.engine = job_file(RECORDS, output={"shard_rows": 3}, **sections), Echo()
        monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_: self.engine)
        self.is_exhaustive = is_exhaustive
        self.truth, self.is_done = None, False

    def write(self, records: list[dict]) -> None:
        Path("in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def choose(self, writers: list[tuple], number: int) -> list[tuple]:
        """Return all writers, or one, another each time."""
        return writers if self.is_exhaustive else [writers[number % len(writers)]]

    def begin(self, after: int | None = None) -> None:
        self.engine = Echo(after)
        self.first = invoke("run", self.path)
        self.engine = Echo()

    def keep(self) -> None:
        """Keep the state; what commands say of it unharmed is the truth."""
        shutil.copytree("runs", "kept", symlinks=True)
        self.run = open_run(Path("runs/test")).path
        self.files = [path.relative_to("runs/test") for path in sorted(self.run.rglob("*")) if path.is_file()]
        self.answers = {name: answer for name, (answer, _) in self.ask().items()}

    def put_back(self) -> None:
        shutil.rmtree("runs")
        shutil.copytree("kept", "runs", symlinks=True)

    def ask(self) -> dict[str, tuple]:
        """Return what the commands that only read say, and with which exit code."""
        found = {}
        for name, args, key in (
            ("status", ("status", self.run, "--json"), "done_rows"),
            ("report", ("report", self.run, "--json"), "rows"),
            ("page", ("report", self.run), None),
            ("export", ("export", self.run), None),
            ("diff", ("diff", self.run, self.run, "--json"), "rows_both"),
            ("verify", ("verify", self.run, "--json"), "rows"),
        ):
            result = invoke(*args)
            answer = json.loads(result.stdout)[key] if key and result.stdout else result.stdout
            found[name] = (answer if name != "page" else result.exit_code, result)
        return found

    def check_readers(self, file: Path) -> None:
        is_checked = not str(Path(*file.parts[1:])).startswith(UNCHECKED)
        for name, (answer, result) in self.ask().items():
            assert result.exit_code in {0} | NAMED, (name, result.output)
            if result.exit_code:
                assert file.name in result.output or str(self.run) in result.output, (name, result.output)
            elif not (name == "status" and "wal" in file.parts):
                assert answer == self.answers[name], name
            if name == "verify":
                assert bool(result.exit_code) == is_checked, result.output

    def check_writer(self, args: tuple) -> int:
        """Ask a command that makes rows: with exit 0 all of them are there, and what it left is whole."""
        self.engine = Echo()
        result = invoke(*args)
        assert result.exit_code in {0} | NAMED, (args, result.output)
        if result.exit_code:
            assert "kvbatch: " in result.stderr, (args, result.output)
        elif args[0] != "plan":
            assert rows("runs/test") == self.truth, (args, result.output)
            problems = args[0] != "retry" and find_problems(open_run(Path("runs/test")))
            assert not problems, (args, [str(problem) for problem in problems])
        return result.exit_code


def harm_and_ask(bench: Bench, pairs: list[tuple[Path, str]], writers: list[tuple]) -> dict[str, int]:
    """Do every harm to its file, ask all commands; return how often each writer ended without an error."""
    successes, failures = dict.fromkeys((args[0] for args in writers), 0), []
    for number, (file, harm) in enumerate(pairs):
        try:
            bench.put_back()
            HARMS[harm](Path("runs/test") / file)
            bench.check_readers(file)
            for args in bench.choose(writers, number):
                if harm == "rotten" and args[0] == "run" and bench.is_done:
                    continue  # whether something is new is told by sizes and times
                bench.put_back()
                HARMS[harm](Path("runs/test") / file)
                successes[args[0]] += bench.check_writer(args) == 0
        except AssertionError as error:
            failures.append(f"{file} {harm}: {error}")
            print(failures[-1], flush=True)
    assert not failures, "\n".join(failures)
    return successes


def pairs_of(bench: Bench, is_exhaustive: bool) -> list[tuple[Path, str]]:
    """Return files with a harm each, another one for each file, or all."""
    if is_exhaustive:
        return [(file, harm) for file in bench.files for harm in HARMS]
    harms = itertools.cycle(HARMS)
    kept = [file for file in bench.files if not file.stem.endswith(("00001", "00002"))]
    return [(file, next(harms)) for file in kept]


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def is_exhaustive(request):
    return request.param


def test_a_finished_run(job_file, monkeypatch, is_exhaustive):
    bench = Bench(job_file, monkeypatch, is_exhaustive)
    bench.begin()
    bench.truth, bench.is_done = rows("runs/test"), True
    bench.keep()
    writers = [("run", bench.path), ("resume", bench.run), ("plan", bench.path)]
    writers += [("retry", bench.run, "--status", "length"), ("retry", bench.run, "--status", "stop")]
    found = harm_and_ask(bench, pairs_of(bench, is_exhaustive), writers)
    assert found["run"] and found["resume"]


def test_a_stopped_run(job_file, monkeypatch, is_exhaustive):
    bench = Bench(job_file, monkeypatch, is_exhaustive)
    bench.begin()
    bench.truth = rows("runs/test")
    shutil.rmtree("runs")
    bench.begin(after=5)
    bench.keep()
    assert any("wal" in file.parts for file in bench.files) and any("commits" in f.parts for f in bench.files)
    writers = [("run", bench.path), ("resume", bench.run)]
    found = harm_and_ask(bench, pairs_of(bench, is_exhaustive), writers)
    assert found["run"] and found["resume"]


@pytest.mark.parametrize("night", ["the last success", "a run that was stopped"])
def test_the_next_night(night, job_file, monkeypatch, is_exhaustive):
    """Of an incremental job: damage of the night before costs time, no row."""
    bench = Bench(job_file, monkeypatch, is_exhaustive, input={"incremental": True})
    bench.begin()
    if night != "the last success":
        bench.write([*RECORDS, {"id": "new", "text": "a new row"}])
        bench.begin(after=0)
    bench.keep()
    bench.write([{"id": "newer", "text": "another"}, *RECORDS[1:], {"id": "new", "text": "a new row"}])
    bench.begin()
    bench.truth = rows("runs/test")
    pairs = pairs_of(bench, is_exhaustive)
    found = harm_and_ask(bench, pairs, [("run", bench.path)])
    is_manifest = [file.name == "manifest.json" for file, _ in pairs]
    assert found["run"] == len(pairs) - sum(is_manifest), "the manifest alone ends a night"
