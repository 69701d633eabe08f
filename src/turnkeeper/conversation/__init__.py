"""One conversation: its inbound journal, its flow's checkpoint, its outbox and its owner, in one log (flows.md)."""
