"""The recipe of the shipped model: text, tokenizer, training, export, and the stats of its model card.

Run a step from the folder above as `python -m recipe.<step>`. `make train` at the top of the repository runs
all steps in order. Nothing here is part of the installed package, and only this folder needs torch.
"""
