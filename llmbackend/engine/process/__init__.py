"""Where an engine's process comes from, how it is spoken to, and who starts another one when it dies."""
