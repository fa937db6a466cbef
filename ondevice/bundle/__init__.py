"""The bundle: a model laid out for flash storage. `layout` places bytes, `writer` makes, `reader` opens."""
