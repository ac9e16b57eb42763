"""The shell around the core: the processes of jobs, the sockets of ranks and of users, the timer.

``scheduler.Scheduler`` carries out what the core decides; ``client_socket.ClientSocket`` answers users.
``job_history`` and ``status`` keep and tell what became of the jobs.
"""
