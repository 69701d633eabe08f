"""Stores: where logs are kept. They know the log alone."""
