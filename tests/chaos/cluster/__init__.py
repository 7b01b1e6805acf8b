"""`make cluster`: frontends, hosts and engines are killed and cut off from each other under live streams.

Begin with run.py; machines are in the modules whose names end with `_cluster`.
"""
