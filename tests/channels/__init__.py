"""Channels, each against what it speaks to."""
