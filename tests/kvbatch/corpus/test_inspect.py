import gzip
import hashlib
import io
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq

from kvbatch.corpus import InputSpec
from kvbatch.corpus.inspect import run_inspect


def inspect(*paths, as_json=True, **options):
    out, err = io.StringIO(), io.StringIO()
    code = run_inspect(InputSpec(tuple(map(str, paths)), **options), as_json=as_json, out=out, err=err)
    return code, out.getvalue(), err.getvalue()


def test_json_lines_and_summary(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": 1.0, "text": "naïve"}\n\nbad\n{"id": "b", "text": " "}\n', encoding="utf-8")
    code, out, _ = inspect(path)
    first, bad, blank, summary = map(json.loads, out.splitlines())
    assert code == 0
    sha1 = hashlib.sha1("naïve".encode()).hexdigest()[:12]
    assert first == {
        "file": str(path), "row": 1, "row_id": 1.0, "status": "ok", "chars": 5, "sha1": sha1, "error": None,
    }  # fmt: skip
    assert (bad["row"], bad["status"], bad["chars"], bad["sha1"]) == (3, "rejected", None, None)
    assert bad["error"].startswith(f"bad_json: {path}:3: ")
    assert (blank["status"], blank["chars"], blank["sha1"]) == (
        "rejected",
        1,
        hashlib.sha1(b" ").hexdigest()[:12],
    )
    assert summary == {"summary": {"rows": 3, "rejected": 2, "fatal": 0}}


def test_nothing_of_a_fatal_file_is_shown_and_the_others_are(tmp_path):
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(20_000))
    (tmp_path / "0.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    (tmp_path / "1.jsonl").write_text('{"text": "whole"}\n')
    (tmp_path / "2.parquet").touch()
    code, out, _ = inspect(tmp_path)
    rows = list(map(json.loads, out.splitlines()))
    assert code == 66
    assert rows.pop() == {"summary": {"rows": 1, "rejected": 0, "fatal": 2}}
    assert sorted((row["file"][len(str(tmp_path)) + 1 :], row["status"]) for row in rows) == [
        ("0.jsonl.gz", "fatal"), ("1.jsonl", "ok"), ("2.parquet", "fatal"),
    ]  # fmt: skip
    assert "truncated" in next(row["error"] for row in rows if row["file"].endswith(".gz"))


def test_the_table_for_people_shows_types_rows_and_reasons(tmp_path):
    pq.write_table(
        pa.table({"key": [7], "body": ["some text"], "n": pa.array([1], pa.int16())}), tmp_path / "a.parquet"
    )
    (tmp_path / "b.jsonl").write_text('{"key": 8, "body": "more", "f": [1]}\nbad\n')
    (tmp_path / "notes.txt").touch()
    code, out, err = inspect(tmp_path, as_json=False, id_column="key", text_column="body")
    assert code == 0
    for part in (
        "n: int16",
        "'some text'",
        "f: mixed (JSON text)",
        "1 bad_json",
        "b.jsonl:2: ",
        "3 rows, 1 rejected",
    ):
        assert part in out
    assert "notes.txt: skipped" in err


def test_people_and_programs_get_the_same_verdict(tmp_path):
    """Two columns of one name, and a type that changes, matter to a job that uses them alone."""
    for number, value in enumerate([1, "one"]):
        columns = [pa.array(["a"]), pa.array(["t"]), pa.array([value]), pa.array([2]), pa.array([3])]
        table = pa.table(columns, ["id", "text", "n", "m", "m"])
        pq.write_table(table, tmp_path / f"{number}.parquet")
    for as_json in (True, False):
        assert inspect(tmp_path, as_json=as_json)[0] == 0


def test_no_model_library_is_loaded(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "t"}\n')
    program = (
        "import sys; from kvbatch.corpus import InputSpec; from kvbatch.corpus.inspect import run_inspect;"
        "run_inspect(InputSpec((sys.argv[1],)), as_json=True, out=sys.stdout, err=sys.stderr);"
        "sys.exit(sorted({'torch', 'transformers', 'polars'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
