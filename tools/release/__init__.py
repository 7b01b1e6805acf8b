"""`make release-check`, which a tag must pass: its steps, and the documents that a release contains (SBOM,
licences)."""
