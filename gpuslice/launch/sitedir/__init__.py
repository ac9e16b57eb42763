"""A directory for PYTHONPATH whose ``sitecustomize`` installs the hooks once torch is imported."""
