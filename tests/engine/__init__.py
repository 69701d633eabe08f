"""The engine's behaviour: the loop, its tools and their policies, delivery, cancellation, several workers."""
