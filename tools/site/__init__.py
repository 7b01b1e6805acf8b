"""The site of the documentation: `make docs` builds docs/*.md and the reference of the public API with mkdocs."""
