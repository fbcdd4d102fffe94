"""Where index K may be cut, without torch."""

PIECE_TOKENS = 1024
"""A request's positions are cut at multiples of it alone. Index scores are computed in tiles that
divide it, so that a key has the same score, bit for bit, however its request is cut."""
