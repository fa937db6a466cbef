"""The bundle: a model laid out for flash. `layout` places its bytes, `writer` makes it, `reader` opens it."""
