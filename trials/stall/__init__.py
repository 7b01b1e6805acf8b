"""Every kind of input at its largest, beside streams and a health probe that must not feel it: `make stall`."""
