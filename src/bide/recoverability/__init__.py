"""What becomes of a message whose handler failed: pure decisions, and the headers that tell of them."""
