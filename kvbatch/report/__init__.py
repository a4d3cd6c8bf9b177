"""What a run did: its summary, page and exports. Imports: errors, text, atomic_file, corpus, job_file, run_dir."""
