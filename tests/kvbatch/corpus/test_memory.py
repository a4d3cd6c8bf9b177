"""Resident memory while reading, measured in a process of its own."""

import gzip
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
