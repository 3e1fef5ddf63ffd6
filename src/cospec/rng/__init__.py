"""Random draws: the streams, and the same draws as tensor operations and as kernels."""
