"""Programs that try a running server for minutes or hours, one per folder: `python -m trials.NAME`; `make` names them.

They use tests.helpers. Their own parts, and a short run of each, are tested in tests/trials.
"""
