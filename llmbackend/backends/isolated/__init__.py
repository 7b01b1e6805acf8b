"""`--backend-config=<backend>,isolation=process`: each instance of a compiled backend in a process of its own.

The process (process.py, host_objects.py) runs the library as the host would, with stand-ins of the host's objects; each
call that the library makes to one of them becomes a message to the host (process_services.py), which makes the call.
"""
