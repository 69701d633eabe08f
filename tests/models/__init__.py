"""The model ports: the providers' real clients over real HTTP, against the fake provider."""
