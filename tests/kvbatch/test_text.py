"""Control characters of ids, file names and messages are shown, never sent."""

import json
import os
import pty
from pathlib import Path

from tests.kvbatch.fakes import Backwards
from tests.kvbatch.streams import RUN, code_with, make_stream, opened, written

EVIL = "a\x1b[31mb\x07\nc\x7f\x9b2J\u202ed\u2028\u2066e\u061c\U000e0041\r\t"
RAW = [char for char in EVIL if char not in "\n\t" and not 31 < ord(char) < 127]


def test_no_terminal_gets_a_control_character(job_file, monkeypatch):
    monkeypatch.setattr("kvbatch.opened_job.opened_job", opened)
    name = f"{EVIL}.jsonl"
    path = str(job_file([]))
    rows = [{"id": f"{EVIL}{n}", "text": "fox"} for n in range(3)] + ['{"id": "\\u001b[1m", "text": 1}']
    Path(name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    Path(f"half{name}").write_bytes(b"\x1f\x8b\x08" + b"\x00" * 7)  # the beginning of a gzip file
    told = {}

    def told_by(*arguments):
        out, err = make_stream("whole"), make_stream("whole")
        code = code_with(monkeypatch, arguments, out, err)
        text = written(out) + written(err)
        found = {char for char in RAW if char in text}
        assert not found, (arguments, found)
        assert "\nc" not in text, arguments
        told[arguments[0]] = text
        return code

    settings = ["-s", f"input.path={json.dumps(name)}", "-s", f"prompt.system={json.dumps(EVIL)}"]
    for fail in ((), (0, 1)):
        monkeypatch.setattr("kvbatch.run.entry.load_llm", lambda *_, fail=fail: Backwards(fail))
        assert told_by("run", path, "--new-run", *settings) == 0
    one, other = sorted(str(run) for run in Path(RUN).glob("2*"))
    assert told_by("inspect", name) == told_by("inspect", name, "--json") == 0
    assert told_by("inspect", f"half{name}") == 66
    assert told_by("validate", path, *settings) == told_by("validate", path, *settings, "--json") == 0
    assert told_by("run", path, "-s", f"input.path={json.dumps('half' + name)}") == 66
    assert told_by("run", path, "-s", f"input.{EVIL}=1") == 78
    for command in ("status", "report"):
        assert told_by(command, one) == told_by(command, one, "--json") == 0
        assert told_by(command, EVIL) == 66
    assert told_by("diff", one, other) == 0
    assert r"a\u001b[31mb\u0007\nc\u007f\u009b2J\u202ed\u2028" in told["diff"], "shown, not left out"
    assert told_by("diff", one, other, "--json") == 0
    assert f"{EVIL}0" in json.loads(told["diff"])["other_status_row_ids"]
    assert told_by("export", one) == told_by("export", one, "--format", "openai-batch") == 0
    ids = [json.loads(line)["custom_id"] for line in told["export"].splitlines()]
    assert ids == [*(f"{EVIL}{n}" for n in range(3)), "\x1b[1m"]


def test_a_terminal_shows_the_control_characters_of_csv(ran, monkeypatch):
    monkeypatch.setattr("kvbatch.report.export._rows", lambda *_: [{"id": EVIL}])
    monkeypatch.setattr("kvbatch.report.export._columns", lambda *_: ["id"])
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal:
        assert code_with(monkeypatch, ["export", RUN, "--format", "csv"], terminal, terminal) == 0
        text = os.read(leader, 4096).decode()
    first, second = r"a\u001b[31mb\u0007", r"c\u007f\u009b2J\u202ed\u2028\u2066e\u061c\udb40\udc41\r"
    assert text.splitlines() == ["id", f'"{first}', f'{second}\t"']
    os.close(leader)
    whole = make_stream("whole")
    assert code_with(monkeypatch, ["export", RUN, "--format", "csv"], whole, None) == 0
    whole.seek(0)
    assert EVIL.encode() in whole.buffer.read(), "data stays data"
