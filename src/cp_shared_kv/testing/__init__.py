"""What the tests, and the check in `make run`, are made of."""
