"""The life cycle of a job: what its ranks' reports are, and its next step, as pure functions of its facts.

``reports`` judges by ``tables`` and ``fences`` what is said of a rank. ``steps.next_step`` alone knows the
order of suspend, start and resume. Nothing here changes a fact or gives an order: ``core`` does.
"""
