"""What a script attaches: which training it is, its own variables, and what the runtime asks of it."""

__all__: list[str] = []
