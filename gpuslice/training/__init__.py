"""An attached training: its identity, the script's own variables, and its interface to the runtime."""

__all__: list[str] = []
