"""The Operations page: models, requests in flight, keys, log and settings of the server. Entry point: page.py."""
