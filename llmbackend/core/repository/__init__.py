"""What should be loaded: the models' directories, their names and configurations, and the agents that look at them."""
