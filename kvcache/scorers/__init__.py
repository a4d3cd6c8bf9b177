"""Scores of tokens, higher to keep: one scorer a file, and their registry. Imports: nothing."""
