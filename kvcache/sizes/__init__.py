"""Bytes of whole and of compressed caches, and of the pages that they lie in. Imports: scorers, config."""
