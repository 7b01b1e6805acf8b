"""What tests of several rooms share: hosts, servers, models, clients. Holds no tests."""
