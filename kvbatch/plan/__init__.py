"""Rows to bins. Imports: errors, text, atomic_file, corpus, job_file, model, run_dir, prompts, engine, kvcache."""
