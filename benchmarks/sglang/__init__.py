"""The plugin in real SGLang servers on two GPUs: `python -m benchmarks.sglang --model-path DIR`.

Stock and shared prefill servers stand side by side and answer the same requests; their answers are
compared bit for bit, and then they are timed in turn. SGLang itself is not modified: what a small
machine needs beside it is a second, test-only plugin (harness_plugin.py).
"""
