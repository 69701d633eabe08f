"""What every store has to keep, run on every store of the `store` fixture (`log/store.py`, LOG-1 to LOG-9)."""
