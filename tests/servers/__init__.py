"""Real servers that the tests start on loopback ports: nothing that runs elsewhere is used or touched."""
