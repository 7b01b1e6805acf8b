"""Programs written for OpenAI's API, unmodified, against a server of ours: `make clients`."""
