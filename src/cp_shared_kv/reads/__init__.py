"""How a rank reads the KV of pages that it does not own."""
