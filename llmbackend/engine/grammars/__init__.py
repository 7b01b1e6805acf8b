"""Which tokens a request may get next: grammar, reasoning, allowed tokens. Start with row_constraint.py."""
