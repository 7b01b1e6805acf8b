"""`--backend-config=<backend>,isolation=process`: each instance of a compiled backend runs in its own process.

The process (process.py, host_objects.py) runs the library as the host would, with proxies for the host's objects. Each
call that the library makes on a proxy becomes a message to the host (process_services.py), which performs the call.
"""
