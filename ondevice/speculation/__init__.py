"""Guesses at what follows, verified together: the text of plain decoding, in fewer passes."""
