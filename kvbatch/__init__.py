"""Batch LLM jobs over long documents: from a job file to Parquet."""

__version__ = "0.1.0"
