"""What a run did: summary, status, export, page. Imports: errors, text, atomic_file, corpus, job_file, run_dir."""
