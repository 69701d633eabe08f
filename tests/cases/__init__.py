"""Field cases: what went wrong for others, and what is right here. One file for each, named after it."""
