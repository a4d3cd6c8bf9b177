"""The block pool, pages in its blocks, and the prefill buffer. Imports: sizes, quantize, kernels."""
