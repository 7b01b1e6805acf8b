"""Programs that exercise a running server for minutes or hours, one per folder: `python -m trials.NAME`; `make` lists
them.

They use tests.helpers. tests/trials contains tests of their own code, and a short run of each.
"""
