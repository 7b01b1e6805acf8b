"""Shared by tests of several packages: hosts, servers, models, clients. Contains no tests."""
