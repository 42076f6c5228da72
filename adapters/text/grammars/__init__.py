"""Grammars of answers: schemas made fit for the compiler, the queue of compilations, and masks of tokens.

Begin with `grammar.py`. Imports the tokenizer, and no other package of the text.
"""
