"""`make cluster`: frontends, hosts, engines and Ray's processes are killed or cut off under live streams.

Begin with run.py; machines are in the modules whose names end with `_cluster`.
"""
