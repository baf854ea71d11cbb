"""The `caraserve` command: arguments, the environment, configuration files."""
