"""The documents of a job, from files on disk to one stream of rows with their provenance.

Owns discovery, decompression, JSONL, Parquet, ids and the types of passthrough columns; knows no tokens.
"""

from kvbatch.corpus.corpus import Corpus
from kvbatch.corpus.discovery import FileProblem, SourceFile
from kvbatch.corpus.document import Document
from kvbatch.corpus.spec import InputSpec

__all__ = ["Corpus", "Document", "FileProblem", "InputSpec", "SourceFile"]
