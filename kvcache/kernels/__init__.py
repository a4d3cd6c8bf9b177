"""Kernels over pages, in C++ and as torch references. Imports: user_cache, sizes, quantize.

`cpu` holds the C++ kernels, `reference` runs everywhere; `registry` chooses.
"""
