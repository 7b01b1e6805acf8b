"""`make stall`: every kind of input at its maximum size, while streams and a health probe must not be affected."""
