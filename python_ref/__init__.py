"""The reference: pure NumPy, readable, bit-exact where a format is; kernels are checked against it."""
