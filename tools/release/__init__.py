"""What a tag must pass: `make release-check`, its steps, and the documents that a release carries (SBOM, licences)."""
