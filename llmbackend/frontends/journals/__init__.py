"""What outlives a connection: journals of resumable streams, and stored responses.

Begin with response_store.py.
"""
