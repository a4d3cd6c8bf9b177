import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.corpus import Corpus, InputSpec
from kvbatch.corpus.types import TypeClash, widen
from kvbatch.errors import InputError, JobFileError


def output(*paths, **options):
    corpus = Corpus(InputSpec(tuple(map(str, paths)), **options))
    documents = list(corpus.documents())
    return documents, corpus.to_table(documents)


def test_parquet_columns_come_out_with_the_type_they_came_in(tmp_path):
    day = datetime.datetime(2031, 1, 2, 3, 4, 5, 678900)
    table = pa.table(
        {
            "id": ["a", "b"],
            "text": ["t", "u"],
            "ns": pa.array([1, None], pa.timestamp("ns", "Europe/Dublin")),
            "us": pa.array([day, None], pa.timestamp("us")),
            "amount": pa.array([decimal.Decimal("-0.000001"), None], pa.decimal128(38, 6)),
            "big": pa.array([decimal.Decimal(10**60), None], pa.decimal256(70, 0)),
            "span": pa.array([1500, None], pa.duration("ms")),
            "u64": pa.array([2**64 - 1, None], pa.uint64()),
            "half": pa.array([1.5, None], pa.float16()),
            "kind": pa.array(["x", "x"]).dictionary_encode(),
            "view": pa.array(["v", None], pa.string_view()),
            "uuid": pa.array([bytes(16), None], pa.uuid()),
            "json": pa.array(['{"a":1}', None], pa.json_()),
            "turns": pa.array([[{"role": "user", "n": 1}], []]),
            "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
            "__index_level_0__": pa.array([5, 6]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    documents, out = output(tmp_path / "a.parquet", passthrough="all")
    wanted = pq.read_table(tmp_path / "a.parquet").drop_columns(["text", "__index_level_0__"])
    assert out.equals(wanted)
    backwards = Corpus(InputSpec((str(tmp_path / "a.parquet"),), passthrough="all"))
    assert backwards.to_table(list(backwards.documents())[::-1]).column("us").to_pylist() == [None, day]
    shown = documents[0].columns
    assert shown["ns"] == "1970-01-01T01:00:00.000000001+01:00"
    assert (shown["us"], shown["amount"], shown["span"]) == (
        "2031-01-02T03:04:05.678900",
        "-0.000001",
        "PT1.500S",
    )
    assert (shown["turns"], shown["map"]) == ('[{"role": "user", "n": 1}]', '{"k": 1}')
    assert documents[1].columns["ns"] == ""


def test_parts_are_matched_by_name_and_widened(tmp_path):
    pq.write_table(pa.table({"id": ["a"], "text": ["t"], "n": pa.array([1], pa.int32()), "m": [{"a": "x"}]}),
                   tmp_path / "0.parquet")  # fmt: skip
    pq.write_table(pa.table({"m": [{"a": "y", "b": 2}], "text": pa.array(["u"], pa.large_string()),
                             "n": [2**40], "id": ["b"]}), tmp_path / "1.parquet")  # fmt: skip
    pq.write_table(pa.table({"text": ["v"], "id": ["c"], "extra": [b"\0"]}), tmp_path / "2.parquet")
    _, out = output(tmp_path, passthrough=("n", "m", "extra"))
    assert out.column("n").type == pa.int64()
    assert out.to_pylist() == [
        {"id": "a", "n": 1, "m": {"a": "x", "b": None}, "extra": None},
        {"id": "b", "n": 2**40, "m": {"a": "y", "b": 2}, "extra": None},
        {"id": "c", "n": None, "m": None, "extra": b"\0"},
    ]


def test_a_clash_names_both_files_and_types(tmp_path):
    pq.write_table(pa.table({"id": ["a"], "text": ["t"], "n": [1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"id": [1], "text": ["t"], "n": ["one"]}), tmp_path / "1.parquet")
    with pytest.raises(InputError) as caught:
        Corpus(InputSpec((str(tmp_path),), passthrough=("n",))).check()
    message = str(caught.value)
    assert "1.parquet: column 'n' is string here and int64 in" in message
    assert "1.parquet: id column 'id' is int64 here and string in" in message
    Corpus(InputSpec((str(tmp_path / "0.parquet"),), passthrough=("n",))).check()


@pytest.mark.parametrize(
    ("left", "right", "wanted"),
    [
        (pa.uint32(), pa.int32(), pa.int64()),
        (pa.uint64(), pa.int64(), None),
        (pa.int64(), pa.float64(), None),
        (pa.string(), pa.binary(), None),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.dictionary(pa.int8(), pa.string()), pa.string(), pa.string()),
        (
            pa.dictionary(pa.int8(), pa.string()),
            pa.dictionary(pa.int32(), pa.string()),
            pa.dictionary(pa.int32(), pa.string()),
        ),
        (pa.time32("ms"), pa.time64("us"), pa.time64("us")),
        (pa.timestamp("s", "UTC"), pa.timestamp("ms", "UTC"), pa.timestamp("ms", "UTC")),
        (pa.timestamp("s", "UTC"), pa.timestamp("s"), None),
        (pa.decimal128(38, 0), pa.decimal128(10, 6), pa.decimal256(44, 6)),
        (pa.list_(pa.int8()), pa.list_(pa.int32()), pa.list_(pa.int32())),
        (pa.null(), pa.date32(), pa.date32()),
    ],
    ids=str,
)
def test_widening_is_safe_and_symmetric(left, right, wanted):
    for pair in ((left, right), (right, left)):
        if wanted is None:
            with pytest.raises(TypeClash):
                widen(*pair)
        else:
            assert widen(*pair) == wanted


@pytest.mark.parametrize(
    ("literals", "type_", "values"),
    [
        (['"x"', "null", '"y"'], pa.string(), ["x", None, "y"]),
        (["true", "false", "null"], pa.bool_(), [True, False, None]),
        (["1", "9007199254740993"], pa.int64(), [1, 9007199254740993]),
        (["1", "2.5", "NaN"], pa.float64(), [1.0, 2.5, "nan"]),
        (["9007199254740993", "2.5"], pa.string(), ["9007199254740993", "2.5"]),
        (["18446744073709551615"], pa.string(), ["18446744073709551615"]),
        (["0.12345678901234567890"], pa.string(), ["0.12345678901234567890"]),
        (["1e999"], pa.string(), ["1e999"]),
        (
            ['"x"', "1.10", "[NaN, 1.10]", '{"k": "é"}'],
            pa.string(),
            ['"x"', "1.10", "[null, 1.10]", '{"k": "é"}'],
        ),
        (["null"], pa.string(), [None]),
    ],
    ids=str,
)
def test_a_json_field_gets_one_type_that_loses_nothing(tmp_path, literals, type_, values):
    lines = [f'{{"id": {n}, "text": "t", "f": {literal}}}' for n, literal in enumerate(literals)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, "not json"]), encoding="utf-8")
    _, out = output(tmp_path / "in.jsonl", passthrough=("f",))
    assert out.column("f").type == type_
    found = ["nan" if value != value else value for value in out.column("f").to_pylist()]
    assert found == [*values, None]


@pytest.mark.parametrize(
    ("ids", "type_"),
    [
        ([1, -(2**63)], pa.int64()),
        ([1, 2**64 - 1], pa.uint64()),
        ([-1, 2**64 - 1], pa.string()),
        ([1, "a"], pa.string()),
        ([1, None], pa.string()),
    ],
    ids=str,
)
def test_the_id_column_holds_every_id_exactly(tmp_path, ids, type_):
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"id": each, "text": "t"}) for each in ids))
    documents, out = output(tmp_path / "in.jsonl")
    assert out.column("id").type == type_
    assert [str(value) for value in out.column("id").to_pylist()] == [
        str(document.row_id) for document in documents
    ]


def test_parquet_and_jsonl_go_together_unless_a_field_clashes(tmp_path, write_jsonl):
    pq.write_table(
        pa.table({"id": ["a"], "text": ["t"], "n": pa.array([1], pa.int8())}), tmp_path / "a.parquet"
    )
    path = write_jsonl("b.jsonl", {"id": 5, "text": "u", "n": 300})
    _, out = output(tmp_path, passthrough=("n",))
    assert out.to_pylist() == [{"id": "a", "n": 1}, {"id": "5", "n": 300}]
    write_jsonl("b.jsonl", {"id": 5, "text": "u", "n": "many"})
    with pytest.raises(InputError, match=r"b\.jsonl: field 'n' holds string, and it is int8 in .*a\.parquet"):
        output(tmp_path, passthrough=("n",))
    assert path.exists()


def test_a_passthrough_value_that_cannot_be_utf8_rejects_its_row_only(write_jsonl):
    path = write_jsonl(
        "a.jsonl", b'{"id": 1, "text": "t", "f": "\\ud800"}', {"id": 2, "text": "u", "f": "\U0001f600"}
    )
    documents, out = output(path, passthrough=("f",))
    assert [document.error_code for document in documents] == ["bad_unicode", None]
    assert out.to_pylist() == [{"id": 1, "f": None}, {"id": 2, "f": "\U0001f600"}]


def test_passthrough_never_hides_an_output_column(write_jsonl):
    path = write_jsonl("a.jsonl", {"id": 1, "text": "t", "kvb_status": "ok"})
    for name in ("output", "kvb_status", "id"):
        with pytest.raises(JobFileError, match=name):
            InputSpec((str(path),), passthrough=(name,))
    with pytest.raises(InputError, match="kvb_status"):
        output(path, passthrough="all")
    with pytest.raises(InputError, match="has the column 'nowhere'"):
        output(path, passthrough=("nowhere",))
