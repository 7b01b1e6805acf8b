"""The Responses API: another format of a chat's requests and answers. Entry point: create.py."""
