"""Tiny models with random weights: that of `--model-path demo`, and others to try code on."""
