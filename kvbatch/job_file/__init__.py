"""The job file: its keys, defaults, checks and errors. Imports: errors, corpus, engine, kvcache."""
