"""The embedded engine: a prefill group, a decode worker and the processes around them."""
