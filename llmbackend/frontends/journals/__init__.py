"""State that outlives a connection: journals of resumable streams, and stored responses.

Entry point: response_store.py.
"""
