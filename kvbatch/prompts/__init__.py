"""Documents to prompts: chat, truncation, parts. Imports: errors, corpus, job_file, model, engine, kvcache."""
