"""The same small table of functions twice: `cpu` (NumPy, BLAS, numba) and `cuda` (the compiled library)."""
