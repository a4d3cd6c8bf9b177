"""C++ kernels over pages, compiled by the system's compiler at first use. Imports `quantize` and below."""
