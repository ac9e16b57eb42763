"""Who runs when. One policy or family per file; ``registry`` finds them by name."""
