"""The training text of the bundled demo model, generated from our own templates.

Used by `tools/train_demo_model.py`. Independent of tokenizers, torch and the server. Invariant: a sample is a pure
function of the given random generator, so a seed and a step number determine the whole training text.
"""
