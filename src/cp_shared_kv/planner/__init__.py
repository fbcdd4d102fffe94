"""What fits, and what it does to hit rate and latency: on machines that need not be there."""
