"""Processes that are forked from one that has imported what they need: engines, and the stubs of python models; and
what any process of a server needs: host policies, start times, temporary folders.

Does not know the other packages. boot.py, server.py and host_policy.py also run in the fork server and its children,
whose interpreter may be another one (Python 3.10 or newer): they import the standard library only.
"""
