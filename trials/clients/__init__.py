"""Unmodified programs written for OpenAI's API, run against our server: `make clients`."""
