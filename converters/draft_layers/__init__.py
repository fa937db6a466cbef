"""Draft layers for finished bundles: readers of published heads, and how a layer is written."""
