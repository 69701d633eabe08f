"""The portable contract: wire types, documents, rules and ports, against shared vectors, traces and another implementation."""
