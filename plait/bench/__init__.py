"""Traffic, measurements and reports: ``plait bench``.

A *session* is what one user does: one prompt, or the turns of a conversation (``workload``). Sessions arrive
in a closed loop or as a Poisson process (``arrivals``), are driven against a *target* (``http_target``: any
OpenAI-compatible server; ``engine_target``: an engine in this process), and leave one *record* per request
(``record``), from which ``figures`` are computed.
"""
