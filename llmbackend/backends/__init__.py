"""Bundled backends other than the llm one."""
