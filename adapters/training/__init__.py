"""Trains the demo family: corpus, tokenizer, tasks, batches, model, training, evaluation and export.

`python -m adapters.training.demo` does all of it from nothing on a CUDA machine.
"""
