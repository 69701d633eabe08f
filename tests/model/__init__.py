"""The rules of a turn against models of them: explored exhaustively, driven at random, and cell by cell."""
