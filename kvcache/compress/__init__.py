"""Which tokens a chunk keeps, and at how many bits. Imports: config, sizes, quantize, kernels, pages."""
