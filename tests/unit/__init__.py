"""One module each, and what only one backend can show."""
