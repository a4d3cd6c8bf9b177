import datetime
import decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.corpus import Corpus, InputSpec
from kvbatch.errors import InputError


def write(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


@pytest.mark.parametrize(
    "type_",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.dictionary(pa.int8(), pa.large_string()),
    ],
    ids=str,
)
def test_every_way_to_store_text_reads_the_same(tmp_path, read, type_):
    texts = pa.array(["naïve 漢字", "b", None, "naïve 漢字"])
    ids = pa.array(["p", "q", "r", "s"])
    column = texts.dictionary_encode().cast(type_) if pa.types.is_dictionary(type_) else texts.cast(type_)
    id_column = ids.dictionary_encode().cast(type_) if pa.types.is_dictionary(type_) else ids.cast(type_)
    path = write(tmp_path / "a.parquet", {"id": id_column, "text": column}, row_group_size=3)
    found = [(document.row_id, document.text, document.error_code) for document in read(path)]
    good = "naïve 漢字"
    assert found == [("p", good, None), ("q", "b", None), ("r", None, "empty_text"), ("s", good, None)]


def test_one_text_that_is_not_utf8_is_one_rejected_row(tmp_path, read):
    path = write(tmp_path / "a.parquet", {"id": [1, 2, 3], "text": [b"a", b"\xff\xfe\x00bad", b"c"]})
    assert [(document.row_id, document.error_code) for document in read(path)] == [
        (1, None),
        (2, "bad_utf8"),
        (3, None),
    ]


@pytest.mark.parametrize(
    ("column", "ids"),
    [
        (pa.array([2**64 - 1, 7], pa.uint64()), [2**64 - 1, 7]),
        (pa.array([b"\x00" * 4, b"abcd"], pa.binary(4)), ["00000000", "61626364"]),
        (pa.array([b"\xff\x00", b"abcd"]), ["ff00", "abcd"]),
        (pa.array([decimal.Decimal("1.10"), decimal.Decimal("2.00")]), ["1.10", "2.00"]),
        (pa.array([datetime.date(2031, 1, 2), datetime.date(1, 1, 1)]), ["2031-01-02", "0001-01-01"]),
        (pa.array([bytes(15) + b"\x07", b"\x80" + bytes(15)], pa.uuid()),
         ["00000000-0000-0000-0000-000000000007", "80000000-0000-0000-0000-000000000000"]),
        (pa.array(["", None]), ["a.parquet:1:86f7e437", "a.parquet:2:e9d71f5e"]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)  # fmt: skip
def test_ids(tmp_path, read, column, ids):
    path = write(tmp_path / "a.parquet", {"id": column, "text": ["a", "b"]})
    assert [document.row_id for document in read(path)] == ids


def test_nested_text_is_refused_with_its_type_or_reached_by_a_path(tmp_path, read):
    table = {"doc": [{"body": "b1", "n": 1}, None], "list": [["x"], []], "doc.n": ["exact", "name"]}
    path = write(tmp_path / "a.parquet", table)
    assert [document.text for document in read(path, text_column="doc.body")] == ["b1", None]
    assert [document.text for document in read(path, text_column="doc.n")] == ["exact", "name"]
    for name, type_ in (("doc", "struct"), ("list", "list")):
        with pytest.raises(InputError, match=rf"a\.parquet: the text column '{name}' has type {type_}"):
            Corpus(InputSpec((str(path),), text_column=name)).check()
    with pytest.raises(InputError, match=r"no text column 'text'; the file has doc"):
        Corpus(InputSpec((str(path),))).check()


def test_a_name_that_two_columns_have_is_refused_only_when_asked_for(tmp_path, read):
    table = pa.Table.from_arrays([pa.array(["a"])] * 4, ["id", "text", "Text", "Text"])
    path = write(tmp_path / "a.parquet", table)
    assert [document.text for document in read(path)] == ["a"]
    with pytest.raises(InputError, match="2 columns are called 'Text'"):
        read(path, text_column="Text")


def test_damage_is_named(tmp_path, read):
    text = ["some text " * 30] * 50
    path = write(tmp_path / "a.parquet", {"text": text}, compression="none", use_dictionary=False,
                 write_page_checksum=True)  # fmt: skip
    whole = path.read_bytes()
    path.write_bytes(whole[:5000] + b"\x01" + whole[5001:])
    with pytest.raises(InputError, match=r"a\.parquet: damaged.*(crc|CRC)"):
        read(path)
    for cut in (whole[:-100], whole[: len(whole) // 2]):
        path.write_bytes(cut)
        with pytest.raises(InputError, match=r"a\.parquet: damaged, cut"):
            read(path)
    path.write_bytes(b"PARE" + whole[4:])
    with pytest.raises(InputError, match="encrypted"):
        read(path)


def test_a_column_encrypted_under_a_plain_footer_is_named(tmp_path, read):
    import pyarrow.parquet.encryption as pe

    class Keys(pe.KmsClient):
        """Wrap keys by not wrapping them."""

        def wrap_key(self, key_bytes, master_key_identifier):
            return key_bytes

        def unwrap_key(self, wrapped_key, master_key_identifier):
            return wrapped_key

    factory = pe.CryptoFactory(lambda _: Keys())
    config = pe.EncryptionConfiguration(
        footer_key="footer", column_keys={"key": ["text"]}, plaintext_footer=True, double_wrapping=False
    )
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    table = pa.table({"id": [1], "text": ["secret"], "open": ["plain"]})
    path = write(tmp_path / "a.parquet", table, encryption_properties=properties)
    with pytest.raises(InputError, match=r"a\.parquet: encrypted"):
        Corpus(InputSpec((str(path),))).check()
    assert [document.text for document in read(path, text_column="open")] == ["plain"]


def test_only_the_columns_of_the_job_are_read(tmp_path, read):
    """A column that nobody asked for may even be damaged."""
    table = {"unused": ["junk " * 500], "text": ["fine"]}
    path = write(
        tmp_path / "a.parquet", table, compression="none", use_dictionary=False, write_page_checksum=True
    )
    data = path.read_bytes()
    position = data.index(b"junk ") + 100
    path.write_bytes(data[:position] + b"?" + data[position + 1 :])
    assert [document.text for document in read(path)] == ["fine"]
