"""The operations of a decoder program on an accelerator, and their implementations."""
