"""Bundled repository agents, laid out as a `--repoagent-directory`; each uses only core.repoagent_api."""
