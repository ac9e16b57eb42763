"""What a job does next: a pure function of what is known of it and of where it is to be.

``steps.next_step`` alone knows the order of suspend, start and resume. Nothing here gives an order: ``core``
takes the steps.
"""
