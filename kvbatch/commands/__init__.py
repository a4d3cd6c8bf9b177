"""The commands: before a run, for running, and after it. Each imports what it needs when it runs."""
