"""The Responses API: another form of a chat's requests and answers. Begin with request.py."""
