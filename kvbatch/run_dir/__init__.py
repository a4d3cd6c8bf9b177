"""The files of a run. Imports: errors, text, atomic_file, corpus, job_file, model, engine, kvcache.

They are written whole, committed in order, verified before they are read, and reused by later runs.
"""
