"""Queues of requests (policies, deadlines), a timer, wake-ups, threads with large stacks. Imports no other package."""
