"""What is special about each store; what all have to keep is in `tests/conformance`."""
