"""`python -m llmbackend.cli`: the `llmbackend` command without the installed script."""

from .main import main

if __name__ == "__main__":
    main()
