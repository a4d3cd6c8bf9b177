"""A model from its name to its files. Imports: errors, text, atomic_file, job_file, engine, kvcache.

They are fetched, converted where they are GGUF, and verified.
"""
