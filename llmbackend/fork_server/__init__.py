"""Processes that are forked from one that has imported what they need: engines, and the stubs of python models.

Knows nothing of the other rooms. boot.py and server.py run in the server process and its children, whose interpreter
may be another one (Python 3.10 or newer): they need the standard library alone. The rest runs in the host.
"""
