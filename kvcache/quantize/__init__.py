"""Keys and values to pages of few bits, and back. Imports: sizes."""
