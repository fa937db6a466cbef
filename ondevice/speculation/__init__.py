"""Draft tokens, verified together: the text of plain decoding, in fewer passes."""
