"""The arithmetic that a device may replace by kernels of its own."""
