"""Generations as all APIs of text share them: the request, the plan of its answer, and the answer over HTTP."""
