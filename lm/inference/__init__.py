"""Prompt to text, and a text's score: decoding and evaluation.

In: a loaded model with its tokenizer, prompts or token arrays. Out: continuations, scores.
Imports lm.formats and the layers below it (lm.data, lm.model, lm.system, lm.config), torch and numpy, but not
Lightning or Hydra.
"""
