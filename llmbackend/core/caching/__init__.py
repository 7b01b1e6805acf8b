"""The response cache: stored responses for equal requests."""
