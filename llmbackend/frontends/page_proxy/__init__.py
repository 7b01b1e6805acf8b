"""The web pages on the HTTP port: forwards browsers to the page process (llmbackend/pages), and starts and ends it."""
