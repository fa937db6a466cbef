"""The native extension; targets/ has one C++ source per kernel, compiled per instruction set."""
