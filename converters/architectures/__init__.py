"""The model families: the config keys of each, and their meaning. `registry.read_config` is the entry."""
