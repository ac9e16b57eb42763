"""The next step of a job, as a pure function of the job's facts and of the devices that it is to have.

``steps.next_step`` alone knows the order of suspend, start and resume. Nothing here gives an order: ``core``
takes the steps.
"""
