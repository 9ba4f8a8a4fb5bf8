"""The reference: pure NumPy, slow and readable, bit-exact where a format is. Kernels are checked against it."""
