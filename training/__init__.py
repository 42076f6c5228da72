"""Trains the demo family: corpus, tokenizer, tasks, batches, model, training, evaluation and export.

`python -m training.demo` does all of it from nothing on a CUDA machine.
"""
