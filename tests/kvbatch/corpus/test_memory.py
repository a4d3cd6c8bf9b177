"""Resident memory while reading, measured in a process of its own."""

import gzip
import io
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvbatch.corpus import Corpus, InputSpec, lines

MEASURE = """
import sys
from kvbatch.corpus import Corpus, InputSpec

def resident_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

def read(path):
    peak = 0
    for number, document in enumerate(Corpus(InputSpec((path,), passthrough="all")).documents(), 1):
        if number % 100 == 0:
            peak = max(peak, resident_mb())
    return number, peak

_, start = read(sys.argv[1])
num_rows, peak = read(sys.argv[2])
print(num_rows, peak - start)
"""


def measure(few_rows: Path, many_rows: Path) -> tuple[int, float]:
    """Return the rows of the larger file, and how much more memory it takes than the smaller one."""
    command = [sys.executable, "-c", MEASURE, str(few_rows), str(many_rows)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    num_rows, growth_mb = done.stdout.split()
    return int(num_rows), float(growth_mb)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_jsonl(tmp_path):
    line = b'{"id": %d, "text": "%s"}\n'
    for name, num_rows in (("few", 200), ("many", 20_000)):
        with gzip.open(tmp_path / name, "wb", compresslevel=1) as file:
            for number in range(num_rows):
                file.write(line % (number, b"log line " * 1_000))
    num_rows, growth_mb = measure(tmp_path / "few", tmp_path / "many")  # 180 MB of text
    assert num_rows == 20_000
    assert growth_mb < 30


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dictionary", [True, False])
def test_memory_does_not_grow_within_one_row_group(tmp_path, dictionary):
    for name, num_rows in (("few", 1_500), ("many", 6_000)):
        texts = [f"{number % 50:06d}" + "word " * 4_000 for number in range(num_rows)]
        table = pa.table({"id": range(num_rows), "text": texts})
        pq.write_table(
            table, tmp_path / name, row_group_size=num_rows, use_dictionary=dictionary, compression="none"
        )
    assert pq.ParquetFile(tmp_path / "many").metadata.num_row_groups == 1
    num_rows, growth_mb = measure(tmp_path / "few", tmp_path / "many")  # 120 MB of text
    assert num_rows == 6_000
    assert growth_mb < 40


@pytest.mark.parametrize(
    "type_", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("columns", [{}, {"where": "n < 1000"}])
def test_a_text_that_a_dictionary_repeats_is_held_once(tmp_path, type_, columns):
    texts = ["long " * 200_000, "short", None] * 43
    values = pa.array(
        [text and text.encode() for text in texts] if type_ == pa.binary() else texts, pa.binary()
    )
    column = values if type_ == pa.binary() else values.cast(pa.string()).cast(type_)
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"id": range(len(texts)), "text": column, "n": range(len(texts))}), path)
    del values, column
    before = pa.total_allocated_bytes()
    held = 0
    for document, text in zip(Corpus(InputSpec((str(path),), **columns)).documents(), texts, strict=True):
        assert document.text == text
        held = max(held, pa.total_allocated_bytes() - before)
    assert held < 16 << 20, "a batch of 128 rows would come to 43 MB"


def test_blank_lines_are_passed_over_without_a_step_for_each(monkeypatch):
    calls = []
    finish = lines._finish
    monkeypatch.setattr(lines, "_finish", lambda *values: calls.append(values[0]) or finish(*values))
    data = b"\n" * 3_000_000 + b"{}\n" + b" \r\n" * 1_000_000 + b"[]"
    found = [(line.number, line.data) for line in lines.iter_lines(io.BytesIO(data), 1000)]
    assert found == [(3_000_001, b"{}"), (4_000_002, b"[]")] and calls == [3_000_001, 4_000_002]


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 64])
def test_lines_are_the_same_however_they_are_read(chunk_bytes):
    draw = random.Random(1)
    pieces = [b"\n", b"\n\n", b" ", b"\r", b"\x0b", b"a", b"bcd efg", b"\xef\xbb\xbf", b"{"]
    for _ in range(300):
        data = b"".join(draw.choice(pieces) for _ in range(draw.randrange(30)))
        wanted = []
        for number, line in enumerate(data.split(b"\n"), 1):
            shown = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).removesuffix(b"\r")
            if len(line) > 9 and line.strip():
                wanted.append((number, None, len(line)))
            elif shown.strip():
                wanted.append((number, shown, len(line)))
        found = lines.iter_lines(io.BytesIO(data), 9, chunk_bytes)
        assert [(line.number, line.data, line.num_bytes) for line in found] == wanted
