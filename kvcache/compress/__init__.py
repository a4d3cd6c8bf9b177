"""Evict and quantize by scores. Imports: config, sizes, quantize, kernels, pages."""
