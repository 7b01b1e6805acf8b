"""What to load: model directories, names and configurations, and the repository agents that check them."""
