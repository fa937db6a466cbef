"""The model families: the keys of each in `config.json`, and their meaning. `registry.read_config` is the
entry.
"""
