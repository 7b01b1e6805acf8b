"""Text and tokens: chat templates, tokenizers, detokenizers, stop strings."""
