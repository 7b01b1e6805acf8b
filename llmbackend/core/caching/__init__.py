"""The response cache: answers of models kept for requests that are equal."""
