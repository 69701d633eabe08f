"""What `turnkeeper init` writes: a service that runs as it is."""
