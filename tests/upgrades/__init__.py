"""Data that earlier releases have written, and releases that meet: read, or refused with a clear error."""
