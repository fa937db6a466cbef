"""Draft layers for finished bundles: EAGLE-3 heads as others publish them, and how a layer is written."""
