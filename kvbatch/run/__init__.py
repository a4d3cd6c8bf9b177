"""A job as it runs: session, shards, retries, limits. Imports: every room below."""
