import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.corpus import Corpus, InputSpec
from kvbatch.errors import InputError, LimitExceeded

ROWS = [{"id": n, "text": f"t{n}", "year": 1990 + n, "source": "ab"[n % 2]} for n in range(1000)]


@pytest.fixture(params=["jsonl", "parquet"])
def path(request, tmp_path, write_jsonl):
    if request.param == "jsonl":
        return write_jsonl("in.jsonl", *ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


def test_where_then_limit(path, read):
    wanted = [row["id"] for row in ROWS if row["year"] > 2200 and row["source"] == "a"]
    where = "year > 2200 AND source LIKE 'a%'"
    assert [document.row_id for document in read(path, where=where)] == wanted
    limited = read(path, where=where, limit=3)
    assert [document.row_id for document in limited] == wanted[:3]
    assert limited[0].row == wanted[0] + 1
    assert read(path, limit=0) == []


@pytest.mark.parametrize(
    "where", ["year >", "year > AVG(year)", "1 = 1", "nowhere = 1", "text", "year IN (1)"]
)
def test_a_condition_that_cannot_be_used_is_refused(path, read, where):
    with pytest.raises(InputError, match="where|nowhere"):
        read(path, where=where)


def test_a_record_is_judged_by_its_own_types(write_jsonl, read):
    lines = [
        {"id": 1, "y": 5},
        {"id": 2, "y": "5"},
        {"id": 3, "y": None},
        {"id": 4},
        b"bad",
        {"id": 5, "y": 2**64},
    ]
    lines = [line | {"text": "t"} if isinstance(line, dict) else line for line in lines]
    found = {
        document.row: document.error_code for document in read(write_jsonl("in.jsonl", *lines), where="y > 4")
    }
    assert found == {1: None, 2: "where_type", 5: "bad_json", 6: None}


def test_a_null_is_no_text_rather_than_of_a_wrong_type(write_jsonl, read):
    lines = [{"id": 1, "y": "ab"}, {"id": 2, "y": None}, {"id": 3}, {"id": 4, "y": 5}]
    path = write_jsonl("in.jsonl", *({"text": "t"} | line for line in lines))
    found = {document.row: document.error_code for document in read(path, where="y LIKE 'a%'")}
    assert found == {1: None, 4: "where_type"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_value_that_cannot_be_judged_rejects_its_row_alone(tmp_path, write_jsonl, read, kind):
    rows = [{"id": n, "text": "t", "year": year} for n, year in enumerate(["1999", "2031", "soon", "2032"])]
    if kind == "jsonl":
        path = write_jsonl("in.jsonl", *rows)
    else:
        path = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    found = [
        (document.row_id, document.error_code) for document in read(path, where="CAST(year AS INT) > 2000")
    ]
    assert found == [(1, None), (2, "where_type"), (3, None)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_quoted_dotted_name_reaches_into_objects(tmp_path, write_jsonl, read, kind):
    rows = [{"id": n, "text": "t", "doc": {"meta": {"lang": "ab"[n % 2]}}} for n in range(4)]
    if kind == "jsonl":
        path = write_jsonl("in.jsonl", *rows)
    else:
        path = tmp_path / "in.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert [document.row_id for document in read(path, where="\"doc.meta.lang\" = 'b'")] == [1, 3]


def test_like_and_numbers_take_columns_that_a_file_or_a_record_lacks(tmp_path, write_jsonl, read):
    for name, columns in (("a", {"y": ["ab", None]}), ("b", {}), ("c", {"z": [1, 9]})):
        pq.write_table(
            pa.table({"id": [f"{name}1", f"{name}2"], "text": ["t", "t"], **columns}),
            tmp_path / f"{name}.parquet",
        )
    where = "y LIKE 'a%' OR z > 5"
    assert [document.row_id for document in read(tmp_path, where=where)] == ["a1", "c2"]
    rows = [{"id": 1, "text": "t"}, {"id": 2, "text": "t", "y": "ab"}, {"id": 3, "text": "t", "z": 9}]
    found = read(write_jsonl("in.jsonl", *rows), where=where)
    assert [(document.row_id, document.error_code) for document in found] == [(2, None), (3, None)]


def test_uuids_are_compared_as_they_are_shown(tmp_path, read):
    ids = pa.array([b"0123456789abcdef", None, b"0123456789abcdeg"], pa.uuid())
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": ids, "text": ["x", "y", "z"]}), path)
    shown = read(path)[0].row_id
    assert [document.row for document in read(path, where=f"id = '{shown}'")] == [1]


def test_a_lone_surrogate_rejects_its_row_alone(write_jsonl, read):
    lines = [b'{"id": 1, "text": "t", "y": "\\ud800"}', {"id": 2, "text": "t", "y": "q"}]
    found = [
        (document.row_id, document.error_code)
        for document in read(write_jsonl("in.jsonl", *lines), where="y = 'q'")
    ]
    assert found == [(1, "bad_unicode"), (2, None)]


def test_rows_that_are_not_selected_decide_no_type(write_jsonl):
    path = write_jsonl("in.jsonl", {"text": "t", "f": 1}, {"text": "t", "f": "x"})
    corpus = Corpus(InputSpec((str(path),), passthrough=("f",), limit=1))
    assert len(list(corpus.documents())) == 1
    assert corpus.passthrough_schema.field("f").type == pa.int64()


def test_a_condition_that_leaves_out_every_row_is_told_and_one_that_leaves_out_some_is_counted(path):
    corpus = Corpus(InputSpec((str(path),), where="year > 5000"))
    for look in (corpus.check_selects, lambda: list(corpus.documents())):
        with pytest.raises(LimitExceeded, match=r"left out 1,000 of 1,000 rows") as caught:
            look()
        assert caught.value.exit_code == 65
    some = Corpus(InputSpec((str(path),), where="year > 2500"))
    assert [len(list(some.documents())) for _ in range(2)] == [489, 489] and some.num_left_out == 511


def test_text_in_double_quotes_is_a_column_that_is_nowhere(path, read):
    with pytest.raises(InputError, match=r"column 'b'.*single quotes: 'b'"):
        read(path, where='source == "b"')


def test_an_input_without_rows_is_no_mistake_of_the_condition(write_jsonl):
    corpus = Corpus(InputSpec((str(write_jsonl("in.jsonl")),), where="y = 1"))
    corpus.check_selects()
    assert list(corpus.documents()) == [] and corpus.warnings == ["the input has no rows"]
