"""Benchmarks: what a durable turn costs beside the bare floor of the same store. Run as `python -m bench`."""
