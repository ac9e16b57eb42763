"""The life cycle of a job: what is said of its ranks, its next step to its devices, and the orders for it.

``state.State`` has the facts that all parts share. ``reports`` judges by ``tables`` what is said of a rank.
``steps.next_step`` alone knows the order of suspend, start and resume.
"""
