"""Frontends and hosts in different processes: RemoteServer in the frontend's, HostEndpoint in the host's.

Begin with wire.py, then remote_server.py and host_endpoint.py.
"""
