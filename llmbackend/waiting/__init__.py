"""Queues of requests: Triton's queue policies, deadlines, a timer, wake-ups. Imports no other package."""
