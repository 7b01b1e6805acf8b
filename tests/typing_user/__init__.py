"""A user's programs, as their type checkers see this package: `make types-check` reads them with mypy and pyright, both
strict, beside the installed wheel. Nothing runs them."""
