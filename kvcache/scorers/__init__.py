"""Which tokens are kept: one scorer a file, and their registry. Imports: nothing."""
