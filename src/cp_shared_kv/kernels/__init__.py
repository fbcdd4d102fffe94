"""Triton kernels for NVIDIA GPUs, below the memory layer: plain tensors in, nothing of the host.

The one place that imports triton, so whoever needs a kernel imports its module when it is on a
GPU. With TRITON_INTERPRET=1 they run on a CPU as well, slowly and bit for bit the same.
"""

WORD_BYTES = 8
"""The unit in which kernels count what they move."""
ALIGNMENT_BYTES = 16
"""What pages and their addresses are multiples of: a thread moves so much at a time."""
