"""Rows to bins that fit. Imports: errors, atomic_file, corpus, job_file, model, run_dir, prompts, engine, kvcache."""
