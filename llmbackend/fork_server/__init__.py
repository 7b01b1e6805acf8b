"""Fork servers for engines and stubs of python models, and helpers of any process: host policies, start times,
temporary folders.

Does not know the other packages. boot.py, server.py and host_policy.py also run in fork servers and their children,
possibly with another interpreter (Python 3.10 or newer): they import only the standard library.
"""
