"""The model of `--model-path demo`: tiny, with random weights, one token a byte."""
