"""The engine and the orders once more, over arrays and compiled, for runs that are long enough to pay."""
