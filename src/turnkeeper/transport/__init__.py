"""Queues between processes: entries published by whoever takes messages in, consumed by whoever works on them."""
