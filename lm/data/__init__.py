"""Text to batches: sources, documents, tokenizers, tokens on disk.

In: DataConfig and TokenizerConfig. Out: TextData (arrays of token ids), and batches (B, T) of tokens and targets.
Imports lm.config, lm.errors, lm.registry and lm.system; numpy, tokenizers, xxhash, tqdm, and torch in `batches` alone.
"""
