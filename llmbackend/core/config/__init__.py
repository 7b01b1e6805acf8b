"""What a model configuration says, and what it must fulfil before a model is loaded from it."""
