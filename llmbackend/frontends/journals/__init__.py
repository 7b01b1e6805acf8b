"""What outlives a connection: journals of streams that clients come back to, and stored responses.

Begin with response_store.py.
"""
