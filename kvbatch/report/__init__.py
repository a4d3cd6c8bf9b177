"""After a run: summary, page, status, diff, export, metrics. May import kvbatch.run_dir and what lies below it."""
