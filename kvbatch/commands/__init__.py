"""The commands: before a run, for running, and after it. Imports: every package below it.

Each command imports what it needs when it runs.
"""
