"""The training text of the bundled demo model, made from our own templates.

For: `tools/train_demo_model.py`. Does not know: tokenizers, torch, the server. Invariant: a sample is a pure function
of the random generator it is given, so a seed and a step number fix the whole training text.
"""
