"""The examples, run as they are by real processes that are killed."""
