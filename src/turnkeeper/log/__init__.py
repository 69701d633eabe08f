"""The fenced log: what is durable, and how it grows. Knows nothing of turns or conversations."""
