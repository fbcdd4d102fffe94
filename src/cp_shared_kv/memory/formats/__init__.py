"""The page formats: what the bytes of a row of KV mean."""
