"""The model families: which config keys each has and what they mean; see `registry.read_config`."""
