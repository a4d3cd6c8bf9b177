import subprocess
import sys
from pathlib import Path

from kvbatch.corpus import Corpus, InputSpec

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_corpus.py"


def test_the_small_corpora_are_real_rows_of_the_right_length(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--size", "small"]
    subprocess.run(command, check=True, capture_output=True)
    names = {"code": "code.jsonl.zst", "legal": "legal.parquet", "logs": "logs.jsonl.gz"}
    for name in names.values():
        documents = list(Corpus(InputSpec((str(tmp_path / name),))).documents())
        assert 1 <= len(documents) <= 6
        assert all(document.status == "ok" and 1_500 <= document.chars <= 8_000 for document in documents)
        assert len({document.row_id for document in documents}) == len(
            {document.sha1 for document in documents}
        )
    first = (tmp_path / names["code"]).read_bytes()
    subprocess.run([*command, "code"], check=True, capture_output=True)
    assert (tmp_path / names["code"]).read_bytes() == first
