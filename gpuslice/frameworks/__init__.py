"""Restarts trainers of other packages by their own checkpoints, without a change of the script.

`adapters` lists the packages; one module each knows a package's trainer. `framework_job` is what they share.
"""
