"""Benchmarks of one part alone."""
