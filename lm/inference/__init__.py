"""Prompt to text, and a text's score: decoding and evaluation.

In: a loaded model with its tokenizer, prompts or token arrays. Out: continuations, scores.
Imports lm.exchange and the rooms below it; torch and numpy, not Lightning or Hydra.
"""
