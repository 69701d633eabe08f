"""One turn: its records, its pure rules, and the session that puts them to a store (journal.md)."""
