"""What a token is drawn from, and with which number: the sampler's parts, which know one row's law and no step."""
