"""Kernels over pages and their torch references, which say what a kernel must compute.

`cpu` holds the C++ ones, `reference` runs everywhere; `registry` chooses.
"""
