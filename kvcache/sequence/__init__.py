"""One sequence's keys and values, whole or compressed. Imports: sizes, kernels, pages, compress."""
