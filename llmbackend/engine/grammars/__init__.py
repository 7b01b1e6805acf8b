"""Which tokens a request may get next: grammar, reasoning, allowed tokens. Begin with row_constraint.py."""
