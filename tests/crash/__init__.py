"""Crash tests: real processes, killed with SIGKILL at every boundary where something becomes durable or happens."""
