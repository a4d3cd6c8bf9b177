import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbatch.corpus import Corpus, InputSpec
from kvbatch.errors import InputError

PACKERS = (
    bytes,
    gzip.compress,
    bz2.compress,
    lzma.compress,
    lambda data: pa.Codec("zstd").compress(data, asbytes=True),
)
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=60).map(lambda text: "x" + text), max_size=8)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(texts=TEXTS, pack=st.sampled_from(PACKERS), escaped=st.booleans(), end=st.sampled_from(["\n", "\r\n"]))
def test_every_text_comes_back_from_every_compression(tmp_path, read, texts, pack, escaped, end):
    lines = [json.dumps({"id": n, "text": text}, ensure_ascii=escaped) for n, text in enumerate(texts)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(pack(end.join(lines).encode()))
    documents = read(path)
    assert [(document.row_id, document.text) for document in documents] == list(enumerate(texts))


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"Starting job 41 ...", "bad_json"),
        (b'{"text": "cut', "bad_json"),
        (b"{'text': 'single quotes'}", "bad_json"),
        (b'{"text": ' + b"[" * 100_000, "bad_json"),
        (b"[1, 2]", "not_an_object"),
        (b'"string"', "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"text": "caf\xe9"}', "bad_utf8"),
        (b'{"text": "lone \\ud800 half"}', "bad_unicode"),
        (b'{"text": null}', "empty_text"),
        (b"{}", "missing_text"),
        (b'{"text": ""}', "empty_text"),
        (b'{"text": " \\n\\u00a0\\u3000"}', "empty_text"),
        (b'{"text": "\\u200b\\ufeff"}', "empty_text"),
        (b'{"text": 12345}', "text_type"),
        (b'{"text": 1.5}', "text_type"),
        (b'{"text": ["a"]}', "text_type"),
        (b'{"text": {"body": "b"}}', "text_type"),
        (b'{"text": "' + b"x" * 200_000 + b'"}', "row_too_large"),
    ],
)
def test_a_bad_line_is_one_rejected_row_and_its_neighbours_run(write_jsonl, read, line, code):
    path = write_jsonl("in.jsonl", {"id": "a", "text": "before"}, b"", line, {"id": "z", "text": "after"})
    first, bad, last = read(path, max_row_bytes=150_000)
    assert (first.text, last.text, bad.status, bad.error_code, bad.row) == (
        "before",
        "after",
        "rejected",
        code,
        3,
    )
    assert bad.error_message.startswith(f"{path}:3: ")
    assert bad.row_id.startswith("in.jsonl:3:")


@pytest.mark.parametrize(
    "text",
    [
        "nul \0 inside",
        "line\u2028and\u0085ends\x0b\x1c",
        "\U0001f469\u200d\U0001f4bb",
        "a\r\nb\rc",
        '{"id": 1}',
        "null",
    ],
)
def test_a_string_is_a_string(write_jsonl, read, text):
    assert read(write_jsonl("in.jsonl", {"text": text}))[0].text == text


def test_ids_keep_type_and_digits(write_jsonl, read):
    literals = [
        "7",
        '"007"',
        "9007199254740993",
        "18446744073709551615",
        "1" * 5000,
        "1.0",
        "1.10",
        "true",
        '" 7 "',
    ]
    lines = [b'{"text": "t", "id": %s}' % literal.encode() for literal in literals]
    found = [document.row_id for document in read(write_jsonl("in.jsonl", *lines))]
    assert found[:4] == [7, "007", 9007199254740993, 18446744073709551615]
    assert found[4:] == ["1" * 5000, "1.0", "1.10", "true", " 7 "]


def test_missing_ids_are_made_up_and_follow_the_content(write_jsonl, read):
    lines = [{"text": "a"}, {"id": None, "text": "b"}, {"id": "", "text": "c"}, {"id": {"k": 1}, "text": "d"}]
    path = write_jsonl("in.jsonl", *lines)
    first = [document.row_id for document in read(path)]
    assert first == [document.row_id for document in read(path)]
    assert first[0] == "in.jsonl:1:86f7e437"
    assert len(set(first)) == 4
    write_jsonl("in.jsonl", {"text": "edited"}, *lines[1:])
    assert [old == document.row_id for old, document in zip(first, read(path), strict=True)] == [
        False,
        True,
        True,
        True,
    ]


def test_bytes_that_are_not_utf8_are_replaced_only_when_asked(write_jsonl, read):
    path = write_jsonl("in.jsonl", b'{"text": "caf\xe9"}')
    assert read(path, encoding_errors="replace")[0].text == "caf\ufffd"


def test_a_path_reaches_inside_and_a_dotted_name_wins(write_jsonl, read):
    path = write_jsonl(
        "in.jsonl", {"doc": {"body": "inside"}}, {"doc.body": "outside", "doc": {"body": "inside"}}
    )
    assert [document.text for document in read(path, text_column="doc.body")] == ["inside", "outside"]


def test_an_id_column_that_no_record_has_is_refused(write_jsonl, read):
    path = write_jsonl("in.jsonl", {"key\ud800": 1, "text": "t"})
    with pytest.raises(InputError, match=r"in\.jsonl: no record has the id column 'uid'.*key\\ud800, text"):
        read(path, id_column="uid")


def test_a_text_column_that_no_record_has_is_warned_of(write_jsonl):
    corpus = Corpus(InputSpec((str(write_jsonl("in.jsonl", {"id": 1, "body": "t"})),)))
    assert [document.error_code for document in corpus.documents()] == ["missing_text"]
    assert "no record has the text column 'text'" in corpus.warnings[0]
