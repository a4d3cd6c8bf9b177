"""Kernels over pages: a protocol, the torch reference, the C++ kernels in `cpu`. Imports `quantize` and below."""
