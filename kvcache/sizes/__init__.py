"""Bytes, pages and blocks as pure integers: page formats, layouts, expectations. Imports: scorers, config."""
