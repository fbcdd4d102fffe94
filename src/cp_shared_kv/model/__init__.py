"""DeepSeek-sparse-attention transformers from Hugging Face checkpoints."""
