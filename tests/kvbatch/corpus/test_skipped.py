"""What a directory holds is read by its bytes, or named with the reason why it is not."""

import gzip
import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.corpus import Corpus, InputSpec
from kvbatch.corpus.compression import READ_BYTES
from kvbatch.errors import InputError

LINE = b'{"id": "%s", "text": "a b"}\n'


def corpus_of(*paths, **options):
    return Corpus(InputSpec(tuple(map(str, paths)), **options))


def skipped(corpus, root):
    return {file.path.removeprefix(f"{root}/"): file.reason for file in corpus.skipped}


def test_rotated_logs_are_read_and_what_is_no_data_is_named(tmp_path):
    logs = {
        "app.2026-11-30.jsonl": LINE % b"a",
        "app.jsonl": LINE % b"b",
        "app.jsonl-20261130": LINE % b"c",
        "app.jsonl.1": b'n cut by a rotation"}\n' + LINE % b"d",
        "app.jsonl.2.gz": gzip.compress(LINE % b"e"),
        "app.log": b"\n \n" + LINE % b"f" + b'{"level": "no text"}\n',
        "app.log.1": b'{"text": "'
        + bytes(b"x" * 100_000)
        + b'"}\n',  # one line, longer than what is looked at
        "lang=de/app.log.3": LINE % b"g",
    }
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        tar.add(__file__, "app.jsonl")
    others = {
        "README.md": b'# Logs\n\n```\n{"id": 1, "text": "t"}\n```\n',
        "_SUCCESS": b"",
        ".app.jsonl.crc": b"crc",
        "_temporary/0/app.jsonl": LINE,
        "array": b'[\n{"text": "t"},\n{"text": "u"}\n]\n',
        "app.csv": b"id,text\n1,t\n",
        "app.jsonl.tmp": LINE,
        "empty.log": b"",
        "logo.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "pretty": b'{\n  "text": "t"\n}\n',
        "settings": b'{"theme": "dark"}\n',  # an object that stands alone and has no text
        "text.log": b"12:00:01 INFO started\n12:00:02 INFO ready\n",
        "wide.log": '{"text": "t"}\n'.encode("utf-16"),
        "zz.tgz": archive.getvalue(),
    }
    for name, data in (logs | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    corpus = corpus_of(tmp_path)
    assert [file.label for file in corpus.files] == list(logs)
    assert [d.row_id for d in corpus.documents() if d.status == "ok" and len(d.text) < 9] == list("abcdefg")
    nothing, hidden = "neither JSONL nor Parquet by name or content", "hidden, its name begins with _ or ."
    assert skipped(corpus, tmp_path) == {
        "README.md": nothing, "array": nothing, "app.csv": nothing, "logo.png": nothing, "pretty": nothing,
        "settings": nothing, "text.log": nothing, "empty.log": "empty", "zz.tgz": "a tar archive",
        "_SUCCESS": hidden, ".app.jsonl.crc": hidden, "_temporary": hidden,
        "app.jsonl.tmp": "unfinished or a copy by its name",
        "wide.log": "UTF-16LE text or binary, and JSONL is UTF-8",
    }  # fmt: skip
    assert skipped(corpus_of(tmp_path / "app*", tmp_path / "app.csv"), tmp_path) == {
        "app.jsonl.tmp": "unfinished or a copy by its name"
    }, "what is named by itself is no file of a pattern"


def test_what_cannot_be_looked_at_is_an_error_and_a_format_that_is_not_asked_for_is_none(tmp_path):
    (tmp_path / "app.log.gz").write_bytes(gzip.compress(LINE * 3)[:20])
    with pytest.raises(InputError, match=r"app\.log\.gz: the gzip data ends early"):
        corpus_of(tmp_path).check()
    (tmp_path / "app.log.gz").unlink()
    (tmp_path / "app.log").write_bytes(LINE)
    with pytest.raises(
        InputError, match=r"no input file found here; .*app\.log: skipped, JSONL, and input\.format"
    ):
        corpus_of(tmp_path, format="parquet").check()


@pytest.fixture
def damaged(tmp_path):
    """A directory of two good files and of one for each place where damage may lie."""
    lines = b"".join(b'{"id": %d, "text": "%s"}\n' % (n, b"ab" * (n % 97)) for n in range(9000))
    packed = gzip.compress(lines)
    (tmp_path / "a.jsonl").write_bytes(LINE % b"first")
    (tmp_path / "b.jsonl.gz").write_bytes(packed[: len(packed) * 9 // 10])
    (tmp_path / "c.jsonl.gz").write_bytes(packed[:20])
    (tmp_path / "d.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / "e.parquet").touch()
    table = pa.table({"id": [str(n) for n in range(300)], "text": [f"{n} " * 400 for n in range(300)]})
    options = {"compression": "none", "use_dictionary": False, "data_page_size": 1000}
    pq.write_table(table, tmp_path / "f.parquet", write_page_checksum=True, **options)
    data = bytearray((tmp_path / "f.parquet").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "f.parquet").write_bytes(data)
    (tmp_path / "g.jsonl").write_bytes(b"<html>503</html>\n")
    (tmp_path / "z.jsonl").write_bytes(LINE % b"last")
    assert len(lines) > 2 * READ_BYTES, "the damage lies in the middle"
    return tmp_path


def test_bad_files_are_left_out_as_a_whole_in_every_pass(damaged):
    corpus = corpus_of(damaged, on_bad_file="skip")
    for _ in range(2):
        assert [document.row_id for document in corpus.documents()] == ["first", "last"]
    found = skipped(corpus, damaged)
    assert sorted(found) == ["b.jsonl.gz", "c.jsonl.gz", "d.parquet", "e.parquet", "f.parquet", "g.jsonl"]
    assert "truncated" in found["b.jsonl.gz"] and "damaged" in found["f.parquet"]
    assert any("b.jsonl.gz" in warning and "truncated" in warning for warning in corpus.warnings)
    with pytest.raises(InputError, match=r"f\.parquet|b\.jsonl\.gz"):
        list(corpus_of(damaged).documents())


def test_an_input_of_bad_files_alone_and_one_that_is_not_there_stay_errors(damaged):
    with pytest.raises(InputError, match=r"(?s)2 problems.*d\.parquet: .*b\.jsonl\.gz: "):
        corpus_of(damaged / "b.jsonl.gz", damaged / "d.parquet", on_bad_file="skip").check()
    with pytest.raises(InputError, match=r"gone\.jsonl: no such file"):
        corpus_of(damaged / "a.jsonl", damaged / "gone.jsonl", on_bad_file="skip").check()
    with pytest.raises(InputError, match=r"input\.where = 'id > 2'"):  # of the job: no file is bad for it
        pq.write_table(pa.table({"id": ["a"], "text": ["t"]}), damaged / "only.parquet")
        list(corpus_of(damaged / "only.parquet", on_bad_file="skip", where="id > 2").documents())


def test_reasons_and_first_names_are_counted(tmp_path):
    from kvbatch.corpus.skipped import SkippedFile, by_reason, notes

    files = [SkippedFile(f"{n}.md", "no data") for n in range(7)] + [SkippedFile("x", "empty")]
    assert by_reason(files) == [
        {"reason": "no data", "files": 7, "first": [f"{n}.md" for n in range(5)]},
        {"reason": "empty", "files": 1, "first": ["x"]},
    ]
    assert notes(files)[0] == "0.md, 1.md, 2.md, 3.md, 4.md and 2 more: skipped, no data"
    assert json.dumps(by_reason(files))
