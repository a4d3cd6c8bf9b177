"""Where pages lie: blocks, pools, lists of pages, prefill buffers. Imports: sizes, quantize, kernels."""
