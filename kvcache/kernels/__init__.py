"""Kernels over pages: a protocol, the torch reference, the C++ kernels. Imports: user_cache, sizes, quantize."""
