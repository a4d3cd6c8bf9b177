"""Corpus files to one stream of documents, with their ids and fields. Imports: errors, text."""

from kvbatch.corpus.corpus import Corpus
from kvbatch.corpus.discovery import FileProblem, SourceFile
from kvbatch.corpus.document import Document
from kvbatch.corpus.spec import InputSpec

__all__ = ["Corpus", "Document", "FileProblem", "InputSpec", "SourceFile"]
