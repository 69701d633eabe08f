"""Channels: how messages of conversations come in and go out (flows.md, Channels)."""
