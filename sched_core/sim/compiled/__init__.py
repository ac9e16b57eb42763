"""The engine and the orders once more, over arrays and compiled, for runs that are long enough to pay.

``choice.worth_compiling`` says whether one is; ``run.run`` carries it out.
The outcome is that of ``sim.engine``, to the last bit.
"""
