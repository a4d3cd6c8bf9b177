import bz2
import gzip
import os
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.corpus import Corpus, InputSpec
from kvbatch.errors import InputError

ROW = {"text": "t"}


def names(*paths, **options):
    return [file.label for file in Corpus(InputSpec(tuple(map(str, paths)), **options)).files]


def test_order_is_arguments_then_names_and_a_file_comes_once(tmp_path, write_jsonl):
    for name in ("b/2.jsonl", "b/10.jsonl", "b/year=2031/part-0.jsonl", "a.jsonl"):
        write_jsonl(name, ROW)
    os.symlink(tmp_path / "a.jsonl", tmp_path / "b" / "link.jsonl")
    os.symlink(tmp_path / "b", tmp_path / "b" / "loop")
    in_b = ["10.jsonl", "2.jsonl", "link.jsonl", "year=2031/part-0.jsonl"]
    assert names(tmp_path / "b") == in_b
    assert names(tmp_path / "b/2.jsonl", tmp_path / "a.jsonl", tmp_path / "b") == [
        "2.jsonl", "a.jsonl", "10.jsonl", "year=2031/part-0.jsonl",
    ]  # fmt: skip
    assert names(tmp_path / "b" / "*.jsonl") == in_b[:3]
    assert names(tmp_path / "b" / "**" / "*.jsonl") == in_b


def test_a_name_that_is_not_utf8_is_refused_by_name(tmp_path):
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"text": "t"}')
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    with pytest.raises(InputError, match=r"caf\\xe9\.jsonl: the file's name is not UTF-8; rename it"):
        Corpus(InputSpec((str(tmp_path),))).check()


def test_equal_names_of_two_places_keep_their_ids_apart(tmp_path, write_jsonl, read):
    documents = read(write_jsonl("a/in.jsonl", ROW), write_jsonl("b/in.jsonl", ROW))
    assert len({document.row_id for document in documents}) == 2


def test_junk_in_a_directory_is_ignored_or_named(tmp_path, write_jsonl):
    pq.write_table(pa.table({"text": ["t"]}), tmp_path / "part-0.snappy.parquet")
    pq.write_table(pa.table({"text": ["t"]}), tmp_path / "no-suffix")
    write_jsonl("part-00001", ROW)
    (tmp_path / "part-00002").write_bytes(gzip.compress(b'{"text": "t"}\n'))
    (tmp_path / "twice.jsonl.gz.bz2").write_bytes(bz2.compress(gzip.compress(b'{"text": "t"}\n')))
    for junk in (
        "_SUCCESS",
        ".part-0.crc",
        "._part-0.parquet",
        ".DS_Store",
        "_temporary/0/part-0.jsonl",
        "README.md",
    ):
        write_jsonl(junk, b"junk")
    corpus = Corpus(InputSpec((str(tmp_path),)))
    corpus.check()
    assert [file.label for file in corpus.files] == [
        "no-suffix",
        "part-0.snappy.parquet",
        "part-00001",
        "part-00002",
        "twice.jsonl.gz.bz2",
    ]
    assert len(corpus.warnings) == 1
    assert "README.md: skipped" in corpus.warnings[0]


def test_a_suffix_that_lies_changes_nothing(tmp_path, write_jsonl, read):
    pq.write_table(pa.table({"text": ["in parquet"]}), tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_bytes(gzip.compress(b'{"text": "in gzip"}\n'))
    write_jsonl("c.jsonl.gz", {"text": "plain"})
    write_jsonl("d.json", {"text": "lines"})
    write_jsonl("e.log", {"text": "named"})
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl.gz", "d.json", "e.log")]
    assert [document.text for document in read(*paths)] == [
        "in parquet",
        "in gzip",
        "plain",
        "lines",
        "named",
    ]


def test_everything_that_cannot_be_read_is_named_at_once(tmp_path, write_jsonl):
    write_jsonl("good.jsonl", ROW)
    (tmp_path / "empty.parquet").touch()
    (tmp_path / "empty.jsonl.gz").touch()
    (tmp_path / "array.json").write_text('[{"text": "t"}]')
    (tmp_path / "pretty.json").write_text('{\n  "text": "t"\n}\n')
    (tmp_path / "html.parquet").write_text("<html>404</html>")
    (tmp_path / "utf16.jsonl").write_text('{"text": "t"}', encoding="utf-16")
    with zipfile.ZipFile(tmp_path / "zip.jsonl", "w") as archive:
        archive.writestr("a.jsonl", "{}")
    pq.write_table(pa.table({"text": ["t"]}), tmp_path / "a.parquet")
    (tmp_path / "packed.parquet").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    with pytest.raises(InputError) as caught:
        Corpus(InputSpec((str(tmp_path), str(tmp_path / "gone.jsonl"), str(tmp_path / "no*match")))).check()
    message = str(caught.value)
    for part in (
        "empty.parquet: the file is empty",
        "empty.jsonl.gz: the file is empty",
        "array.json: it is one JSON document",
        "pretty.json: it is one JSON document",
        "html.parquet: it is not Parquet",
        "utf16.jsonl: it is UTF-16LE text",
        "zip.jsonl: it is a zip archive",
        "packed.parquet: Parquet inside gzip",
        "gone.jsonl: no such file",
        "no*match: no input file found",
    ):
        assert part in message
    assert "good.jsonl" not in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(write_jsonl):
    path = write_jsonl("secret.jsonl", ROW)
    path.chmod(0)
    with pytest.raises(InputError, match=r"secret\.jsonl: cannot be opened: Permission denied"):
        Corpus(InputSpec((str(path),))).check()


def test_the_format_asked_for_is_insisted_on(tmp_path, write_jsonl):
    path = write_jsonl("a.jsonl", ROW)
    with pytest.raises(InputError, match="input.format is parquet, but the file is text"):
        Corpus(InputSpec((str(path),), format="parquet")).check()


def test_a_truncated_file_is_fatal_once_reached(tmp_path, write_jsonl, read):
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(20_000))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines)[:-2000])
    with pytest.raises(InputError, match=r"cut\.jsonl\.gz: the gzip data ends early: the file is truncated"):
        read(tmp_path / "cut.jsonl.gz")
