"""What rows ask of sampling, and tokens from logits on the host."""
