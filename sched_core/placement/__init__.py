"""Where a job goes, once a policy has decided that it runs."""
