"""The metrics page: Triton's nv_* families, those that backends make, and how long requests took."""
