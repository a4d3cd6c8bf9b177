"""Kernels over pages and their torch twins, which say what a kernel must compute.

`cpu` holds the C++ ones, `torch_twin` runs everywhere; `registry` chooses.
"""
