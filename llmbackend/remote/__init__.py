"""Frontends and hosts in different processes: RemoteServer on the frontend's side, HostEndpoint on the host's side.

Start with wire.py, then remote_server.py and host_endpoint.py.
"""
