"""Checked, parallel reads from flash past the page cache, on demand or ahead of use."""
