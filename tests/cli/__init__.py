"""Tests that drive the real command."""
