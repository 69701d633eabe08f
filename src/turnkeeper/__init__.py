"""Durable turns for LLM agents and chat bots."""
