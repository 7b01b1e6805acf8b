"""Generation, shared by all text APIs: the request, the plan of its answer, and the answer over HTTP."""
