"""Kernels over pages: a protocol, the torch reference, the C++ kernels in `cpu`. Imports: user_cache, sizes, quantize."""
