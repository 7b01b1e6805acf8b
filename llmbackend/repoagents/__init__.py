"""Bundled repository agents, laid out as a `--repoagent-directory`; each is a user of core.repoagent_api alone."""
