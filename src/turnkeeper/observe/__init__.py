"""What can be watched from outside: traces, metrics, and the fields of log records. Off unless a host switches it on."""
