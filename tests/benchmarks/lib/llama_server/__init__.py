"""Builds llama.cpp's own server from llama-cpp-python's source, on the libraries that its package brought."""
