"""One sequence's cache, full or compressed. Imports: sizes, kernels, pages, compress."""
