"""The native extension: one C++ source per kernel, compiled per target, picked at run time."""
