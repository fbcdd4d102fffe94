"""Where KV bytes live: page formats, buffers, the pool, and the logical pages over it."""
