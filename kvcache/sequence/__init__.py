"""One sequence's cache, full or compressed. Imports `compress` and below."""
