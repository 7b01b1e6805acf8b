"""What should be loaded: model directories, names and configurations, and the repository agents that check them."""
