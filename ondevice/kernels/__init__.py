"""The native extension: in targets/ one C++ source per kernel, compiled per instruction set."""
