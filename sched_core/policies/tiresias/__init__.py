"""Tiresias: attained service in two dimensions, in multi-level feedback queues (Gu et al., NSDI 2019).

``policy`` holds the two policies, ``policy.TwoDas`` and ``policy.TwoDGittins``.
``mlfq`` is the queues and ``gittins`` the index that orders them.
"""
