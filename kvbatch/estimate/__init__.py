"""What a job will cost and lose, before it runs: plan, quality, tune. Imports: every package below it."""
