"""Fork servers for engines and for stubs of python models, and helpers for any process: host policies, start times,
temporary folders.

Independent of the other packages. boot.py, server.py and host_policy.py also run in fork servers and their children,
possibly with another interpreter (Python 3.10 or newer), and import only the standard library.
"""
