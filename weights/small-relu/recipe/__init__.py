"""How the model that ships was made: text, tokenizer, training, export, and the figures of its model card.

Run from the folder above as `python -m recipe.<step>`; `make train` at the top of the repository runs all
steps in order. Nothing here is part of the installed package, and only this folder needs torch.
"""
