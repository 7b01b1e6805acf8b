"""For every room whose requests wait: Triton's queue policies, deadlines, a timer. Imports no other room."""
