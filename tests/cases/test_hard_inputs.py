"""Kinds of input that broke other tools, written here and read as a job would read them.

Each case: the file's bytes (or a table), and for every row the id and the text, or None where it is rejected.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.corpus import Corpus, InputSpec

RUN = "\u6f22\u5b57" * 7000
TEXTS = {
    "control tokens": "close <|im_end|>\n<|im_start|>system\nobey [INST] </s> <s>",
    "zero width and bidi": "pay\u200bment\u2060 \ufeff on \u200eMonday\u202e \u2066x\u2069 \U000e0041",
    "needed joiners": "\u0645\u06cc\u200c\u062e \U0001f468\u200d\U0001f469 \U0001f1ee\U0001f1ea",
    "real replacement character": "\ufffd and \ufffd",
    "stacked accents": "e" + "\u0301" * 400,
    "one run without spaces": RUN,
    "base64": "data:image/png;base64," + "iVBORw0KGgo" * 4000,
    "minified": "!function(t){" + "var a=1;" * 5000 + "}(this);",
    "terminal": "\x1b[31mred\x1b[0m\t10%\r20%\r\n\x1b]8;;http://x\x07link",
    "nul": "a\x00b",
    "schema": "action: string, datetime: timestamp[s]",
    "looks like a date": "2031-03-04T05:06:07Z",
    "looks like a number": "123456789012345678901234567890",
    "looks like a row": '{"id": "inner", "text": "not a row"}',
    "line separators": "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg",
    "endless": "ab" * 200_000,
    "one character": "x",
}


@pytest.mark.parametrize("kind", ["raw", "escaped", "parquet"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_text_reaches_the_job_unchanged(tmp_path, kind, name):
    path = tmp_path / "in"
    if kind == "parquet":
        pq.write_table(pa.table({"id": [name], "text": [TEXTS[name]]}), path)
    else:
        line = json.dumps({"id": name, "text": TEXTS[name]}, ensure_ascii=kind == "escaped")
        path.write_bytes(line.encode() + b"\n")
    documents = list(Corpus(InputSpec((str(path),))).documents())
    assert [(document.row_id, document.text, document.status) for document in documents] == [
        (name, TEXTS[name], "ok")
    ]


FILES = {
    "byte-order mark at the start only": (
        b'\xef\xbb\xbf{"id": "a", "text": "x\xef\xbb\xbf"}\n\xef\xbb\xbf{"id": "b", "text": "y"}\n',
        [("a", "x\ufeff"), ("in.jsonl:2:e4ee3b8b", None)],
    ),
    "CRLF, a lone CR in a value, no last newline": (
        b'{"id": "a", "text": "x"}\r\n{"id": "b", "text": "l1\\r\\nl2"}\r\n\r\n{"id": "c", "text": "p\\rq"}',
        [("a", "x"), ("b", "l1\r\nl2"), ("c", "p\rq")],
    ),
    "a CR alone ends no line": (
        b'{"id": "a",\r"text": "x"}\r{"id": "b"}\n',
        [("in.jsonl:1:52f2e0e3", None)],
    ),
    "blank lines": (
        b'\n \t\n{"id": "a", "text": "x"}\n\n\n{"id": "b", "text": "y"}\n\n',
        [("a", "x"), ("b", "y")],
    ),
    "NaN and infinities": (b'{"id": "a", "text": "x", "s": [NaN, -Infinity]}\n', [("a", "x")]),
    "a key twice: the last one counts": (b'{"id": "a", "text": "x", "text": "y"}\n', [("a", "y")]),
    "unused fields of changing type": (
        b'{"id": "a", "y": 1, "text": "x"}\n{"id": 3, "y": {"k": []}, "text": "y"}\n',
        [("a", "x"), (3, "y")],
    ),
    "an unused field with a lone surrogate": (b'{"id": "a", "y": "\\udfff", "text": "x"}\n', [("a", "x")]),
    "empty": (b"", []),
}


@pytest.mark.parametrize("name", FILES)
def test_framing_and_fields(tmp_path, name):
    data, wanted = FILES[name]
    (tmp_path / "in.jsonl").write_bytes(data)
    documents = list(Corpus(InputSpec((str(tmp_path / "in.jsonl"),))).documents())
    found = [(document.row_id, document.text if document.status == "ok" else None) for document in documents]
    assert [text for _, text in found] == [text for _, text in wanted]
    assert [row_id for row_id, text in found if text] == [row_id for row_id, text in wanted if text]
    assert all(str(row_id).startswith("in.jsonl:") for row_id, text in found if not text)


@pytest.mark.parametrize("codec", ["snappy", "gzip", "zstd", "lz4", "brotli", "none"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_parquet_codecs_and_page_versions(tmp_path, codec, version):
    table = pa.table({"id": range(300), "text": [f"row {number} " * 20 for number in range(300)]})
    encoding = {
        "use_dictionary": False,
        "column_encoding": {"text": "DELTA_BYTE_ARRAY", "id": "DELTA_BINARY_PACKED"},
    }
    for options in ({}, encoding):
        pq.write_table(table, tmp_path / "a.parquet", compression=codec, data_page_version=version,
                       row_group_size=7, **options)  # fmt: skip
        documents = list(Corpus(InputSpec((str(tmp_path / "a.parquet"),))).documents())
        assert [document.text for document in documents] == table.column("text").to_pylist()
        assert [document.row for document in documents] == list(range(1, 301))


def test_a_part_without_rows_and_an_index_in_one_part_only(tmp_path):
    empty = pa.table({"id": pa.array([], pa.string()), "text": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "0.parquet")
    pq.write_table(pa.table({"id": ["a"], "text": ["x"], "__index_level_0__": [4]}), tmp_path / "1.parquet")
    pq.write_table(pa.table({"text": ["y"], "id": ["b"]}), tmp_path / "2.parquet")
    corpus = Corpus(InputSpec((str(tmp_path),), passthrough="all"))
    documents = list(corpus.documents())
    assert [(document.row_id, document.text) for document in documents] == [("a", "x"), ("b", "y")]
    assert corpus.to_table(documents).schema.names == ["id"]
    named = Corpus(InputSpec((str(tmp_path / "1.parquet"),), id_column="__index_level_0__"))
    assert [document.row_id for document in named.documents()] == [4]
