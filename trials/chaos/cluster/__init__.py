"""`make cluster`: frontends, hosts, engines and Ray's processes are killed or disconnected while streams are live.

Start with run.py; machines are in the modules whose names end with `_cluster`.
"""
