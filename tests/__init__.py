"""Turnkeeper's tests."""
