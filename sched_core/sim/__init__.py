"""The simulator: an event heap and a cost model around the same policies that drive live jobs.

``run.run_one`` and ``run.run_all`` carry out ``run.Request``s; ``outcome.Outcome`` is what comes of one.
``metrics``, ``table`` and ``report`` make numbers and files of it.
"""
