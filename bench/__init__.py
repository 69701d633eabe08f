"""Benchmarks: what a durable turn costs beside the bare floor of the same disk. Run as `python -m bench`."""
