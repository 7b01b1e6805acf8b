"""The CPU path: one decoder program in native memory, its weights and its KV; the fallback is torch's own modules."""
