"""Functions that the kernels share."""
