"""What is done when a job has ended: its command ``--on-end``, and the message to its URL ``--notify``."""
