"""How a file that cannot be read becomes JSONL or Parquet: one line a kind, with tools that most machines have."""

import os

_UNPACKED = "unpack it first"
_BY_KIND = {
    "an Arrow IPC file": "python -c \"import polars as p; p.read_ipc('a.arrow').write_parquet('a.parquet')\"",
    "an ORC file": "python -c \"from pyarrow import orc, parquet as p; p.write_table(orc.read_table('a.orc'), "
    "'a.parquet')\"",
    "an Avro file": "python -c \"import polars as p; p.read_avro('a.avro').write_parquet('a.parquet')\"",
    "an SQLite database": "sqlite3 -json a.db 'SELECT * FROM t' | jq -c '.[]' > a.jsonl",
    "a PDF": 'take its text out, with pdftotext a.pdf a.txt, then python -c "import json; '
    "print(json.dumps({'id': 'a.pdf', 'text': open('a.txt').read()}))\" > a.jsonl",
    **dict.fromkeys(("a zip archive", "a tar archive", "a 7z archive", "a RAR archive"), _UNPACKED),
    "compressed with the legacy format of lz4": "lz4 -d a.lz4, then compress it again",
    "compressed with snappy": "unpack it, and compress it with zstd",
    "compressed with compress": "gunzip a.Z",
    "compressed with lzma": "unlzma a.lzma",
}
_TEXT = (
    "python -c \"import json, sys; [print(json.dumps({'id': f, 'text': open(f, encoding='utf-8').read()})) "
    'for f in sys.argv[1:]]" *.txt > a.jsonl'
)
_CSV = "python -c \"import polars as p; p.read_csv('a.csv').write_ndjson('a.jsonl')\""
_BY_SUFFIX = {
    ".csv": _CSV,
    ".tsv": _CSV.replace("a.csv')", "a.tsv', separator='\\t')"),
    ".xlsx": "python -c \"import polars as p; p.read_excel('a.xlsx').write_ndjson('a.jsonl')\"",
}


def how_to_convert(what: str, path: str = "") -> str:
    """Say in one line how a file of that kind becomes JSONL or Parquet.

    Args:
        what: the kind, as `kvbatch.corpus.sniff` names it; of text, anything.
        path: of the file, whose suffix tells more.
    """
    suffix = os.path.splitext(path.lower())[1]
    return _BY_SUFFIX.get(suffix) or _BY_KIND.get(what) or _TEXT
